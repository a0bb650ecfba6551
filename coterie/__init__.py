"""coterie: personalized federated learning, every method under one contract and one evaluator.

    import coterie

    federation = coterie.Federation.from_clients(clients)           # a list of (x, y), one pair a client
    result = coterie.run("fedfew:models=3", model, federation, rounds=50, lr=0.05)
    result.model_for(0)                                             # an nn.Module for client 0

    coterie.experiment("file.toml").run()                           # what `coterie compare --config file.toml` trains

A name is imported when it is first used: a process that wants the version alone does not wait for PyTorch.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "Batch", "BelowOne", "Clustered", "Cohort", "CoterieError", "Count", "CountOrZero", "Each", "Federation",
    "FewModels", "Given", "Init", "Layout", "Method", "Metric", "Model", "Models", "Net", "NonNegative", "Nothing",
    "Personal", "Positive", "Range", "Record", "Result", "Share", "Training", "Upload", "Uploads", "compare", "enrol",
    "experiment", "pick", "run", "sent",
]

if TYPE_CHECKING:  # what `_PLACES` says, for readers that do not run the code
    from coterie.contract import sent
    from coterie.contract.cohort import Cohort, Init
    from coterie.contract.layout import Layout
    from coterie.contract.method import Method, Uploads, enrol, pick
    from coterie.contract.metric import Metric
    from coterie.contract.net import Batch, Given, Net
    from coterie.contract.records import Each, Model, Models, Nothing, Record, Upload
    from coterie.contract.shapes import Clustered, FewModels, Personal
    from coterie.data import Federation
    from coterie.errors import CoterieError
    from coterie.options import BelowOne, Count, CountOrZero, NonNegative, Positive, Range, Share
    from coterie.running.experiment import experiment
    from coterie.running.result import Result
    from coterie.running.runs import compare, run
    from coterie.running.training import Training
else:
    from importlib import import_module
    from importlib.util import find_spec

    _PLACES = {
        "coterie.contract": ("sent",),  # a module, which its package does not import by itself
        "coterie.contract.cohort": ("Cohort", "Init"),
        "coterie.contract.layout": ("Layout",),
        "coterie.contract.method": ("Method", "Uploads", "enrol", "pick"),
        "coterie.contract.metric": ("Metric",),
        "coterie.contract.net": ("Batch", "Given", "Net"),
        "coterie.contract.records": ("Each", "Model", "Models", "Nothing", "Record", "Upload"),
        "coterie.contract.shapes": ("Clustered", "FewModels", "Personal"),
        "coterie.data": ("Federation",),
        "coterie.errors": ("CoterieError",),
        "coterie.options": ("BelowOne", "Count", "CountOrZero", "NonNegative", "Positive", "Range", "Share"),
        "coterie.running.training": ("Training",),
        "coterie.running.experiment": ("experiment",),
        "coterie.running.result": ("Result",),
        "coterie.running.runs": ("compare", "run"),
    }
    _PLACE = {name: place for place, names in _PLACES.items() for name in names}

    def __getattr__(name):
        """A public name, or a part of the package (`coterie.data.digits()` needs no import of its own)."""
        if name in _PLACE:
            place = import_module(_PLACE[name])
            found = getattr(place, name) if hasattr(place, name) else import_module(f"{_PLACE[name]}.{name}")
        elif not name.startswith("_") and find_spec(f"coterie.{name}"):
            found = import_module(f"coterie.{name}")
        else:
            raise AttributeError(f"module 'coterie' has no attribute '{name}'")
        globals()[name] = found  # from now on without this function
        return found

    def __dir__():
        return sorted({*globals(), *__all__})
