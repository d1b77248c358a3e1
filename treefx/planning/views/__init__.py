"""Plans and profiles in words and pictures.

In: a plan or a profile. Out: text and images. They import what they show; what they show finds
them in ``treefx.views``.
"""
