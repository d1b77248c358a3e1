"""torchtune: its decoders compiled whole, with modules that have its call sites."""
