"""The live view's server: only this machine, only two addresses, and unchanged data are not sent again."""

import json
import shutil
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from coterie.errors import CoterieError
from coterie.report.watch import server


@contextmanager
def serving(path, port=0):
    with server([path], port) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{one.server_address[1]}", one.server_address
        one.shutdown()


def test_page_and_data_are_served_on_this_machine_only(compared):
    with serving(compared / "ifca" / "seed0") as (address, (host, port)):
        assert host == "127.0.0.1"
        assert b'id="headline"' in urllib.request.urlopen(address + "/").read()
        reply = urllib.request.urlopen(address + "/data.json")
        data = json.loads(reply.read())
        assert (data["live"], data["progress"]["finished"]) == (True, 1)
        again = urllib.request.Request(address + "/data.json", headers={"If-None-Match": reply.headers["ETag"]})
        with pytest.raises(urllib.error.HTTPError, match="304"):
            urllib.request.urlopen(again)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(address + "/../config.json")
        with pytest.raises(CoterieError, match=f"port {port} cannot be used"):
            server([compared], port)


def test_a_run_without_an_evaluation_is_waited_for(compared, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(compared / "ifca" / "seed0" / "config.json", run)
    with serving(run) as (address, _):
        assert b"Waiting for the first evaluation" in urllib.request.urlopen(address).read()
