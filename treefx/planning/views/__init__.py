"""Format plans and profiles as text and images.

In: a plan or a profile. Out: text and images. Views import plans and profiles, which find them by name in
    ``treefx.views``.
"""
