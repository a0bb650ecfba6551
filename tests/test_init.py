"""What `import coterie` gives, and what it does not load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import coterie

SOURCE = Path(coterie.__file__)


def light(program):
    """Runs the program in a fresh interpreter; it must leave PyTorch unloaded."""
    program += "\nimport sys\nassert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_alone_loads_no_torch():
    light("import coterie")
    assert light("import coterie; print(coterie.__version__)").strip() == coterie.__version__
    light("import coterie; dir(coterie); assert not hasattr(coterie, 'federation')")
    light("from coterie import CoterieError")


def test_the_version_on_the_command_line_loads_no_torch():
    said = light("""
import sys
sys.argv = ["coterie", "--version"]
from coterie.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
""")
    assert said == f"coterie {coterie.__version__}\n"


def test_names_are_loaded_where_they_are_used():
    program = """
import sys, coterie
from coterie import Federation, Method
assert 'torch' in sys.modules
assert coterie.Federation is Federation
assert Federation.__module__.startswith('coterie.data')
assert len(coterie.data.digits()[0]) == 1797
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_star_import_brings_the_public_names():
    names = {}
    exec("from coterie import *", names)
    assert set(coterie.__all__) <= set(names)
    assert names["run"] is coterie.run


def test_every_public_name_is_listed_and_is_what_type_checkers_see():
    """The imports that type checkers read, the table that the interpreter reads and __all__ are one list."""
    block = next(one for one in ast.parse(SOURCE.read_text("utf-8")).body if isinstance(one, ast.If))
    seen = {one.module: tuple(alias.name for alias in one.names) for one in block.body}
    assert seen == coterie._PLACES
    assert sorted(name for names in seen.values() for name in names) == sorted(coterie.__all__)
    assert set(coterie.__all__) | {"__version__"} <= set(dir(coterie))


@pytest.mark.parametrize("name", ["Fedration", "runn", "__main__", "_private"])
def test_an_unknown_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module 'coterie' has no attribute '{name}'"):
        getattr(coterie, name)
