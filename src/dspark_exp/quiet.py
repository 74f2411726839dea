"""Libraries speak up from warnings on; the command line and every rank say the rest in their own lines."""

from __future__ import annotations

import logging
import warnings

_LOGGERS = ("lightning.pytorch", "lightning.fabric", "httpx", "alembic", "mlflow")


def quiet_libraries() -> None:
    """For this process."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
