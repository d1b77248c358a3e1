"""torchtitan: its decoders on distinct tokens, with modules that have its call sites."""
