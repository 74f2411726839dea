"""Lossless speculative decoding over batches of requests."""

from dspark_exp.decoding.batch import Clock, DecodingBatch
from dspark_exp.decoding.early_exit import EarlyExit
from dspark_exp.decoding.loop import SpeculativeLoop
from dspark_exp.decoding.policies import Fixed, Full, Rotation, Threshold, VerificationPolicy, check_policy
from dspark_exp.decoding.requests import Generation, Request, Round, positions_needed
from dspark_exp.decoding.sampling import Sampling
from dspark_exp.decoding.verification import Verdict, verify_block

__all__ = [
    "Clock",
    "DecodingBatch",
    "EarlyExit",
    "Fixed",
    "Full",
    "Generation",
    "Request",
    "Rotation",
    "Round",
    "Sampling",
    "SpeculativeLoop",
    "Threshold",
    "Verdict",
    "VerificationPolicy",
    "check_policy",
    "positions_needed",
    "verify_block",
]
