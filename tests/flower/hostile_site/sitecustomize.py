"""On the path of one site's processes: whatever that site's client app sends is spoiled as `hostile_plan` says.

The package itself knows nothing of it: the hook waits until `coterie.flower.message` is imported and changes how that
encodes answers.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys

NAME = "coterie.flower.message"


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def patched(module):
            execute(module)
            honest = module.Encoder.records

            def records(encoder, parcels):
                import hostile_plan

                return hostile_plan.spoiled(honest(encoder, parcels), parcels)

            module.Encoder.records = records

        spec.loader.exec_module = patched
        return spec


sys.meta_path.insert(0, Finder())
