"""coterie: personalized federated learning, every method under one contract and one evaluator.

    import coterie

    federation = coterie.Federation.from_clients(clients)           # a list of (x, y), one pair a client
    result = coterie.run("fedfew:models=3", model, federation, rounds=50, lr=0.05)
    result.model_for(0)                                             # an nn.Module for client 0
"""

__version__ = "0.1.0"

from coterie.contract.cohort import Cohort, Init
from coterie.contract.layout import Layout
from coterie.contract.method import Method, Uploads, pick
from coterie.contract.net import Batch, Given, Net
from coterie.contract.records import Each, Model, Models, Nothing, Record, Upload
from coterie.data import Federation
from coterie.errors import CoterieError
from coterie.running.config import Training
from coterie.running.result import Result
from coterie.running.runs import compare, run

__all__ = [
    "Batch", "Cohort", "CoterieError", "Each", "Federation", "Given", "Init", "Layout", "Method", "Model", "Models",
    "Net", "Nothing", "Record", "Result", "Training", "Upload", "Uploads", "compare", "pick", "run",
]
