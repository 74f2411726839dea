"""dspark_exp: the laboratory bench for speculative-decoding drafters."""

__version__ = "0.1.0"
