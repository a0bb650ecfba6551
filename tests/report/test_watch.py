"""The live view's server: only this machine, only two addresses, and unchanged data are not sent again."""

import http.client
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


def asked(port, path="/", method="GET", hosts=()):
    """Status and body of a request with these Host lines, of which browsers send one."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    line.putrequest(method, path, skip_host=True)
    for host in hosts:
        line.putheader("Host", host)
    line.endheaders()
    reply = line.getresponse()
    body = reply.read()
    line.close()
    return reply.status, body


def test_only_this_machines_names_are_answered(compared):
    """A page of evil.example can make its own name mean 127.0.0.1, and its scripts then ask under that name."""
    with serving(compared / "ifca" / "seed0") as (_, (_, port)):
        for host in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]"):
            assert asked(port, "/data.json", hosts=[f"{host}:{port}"])[0] == 200, host
        wrong = ["evil.example", f"evil.example:{port}", "127.0.0.1", "localhost", "localhost:80", f"127.0.0.1.:{port}",
                 f"localhost.evil.example:{port}", f"evil@127.0.0.1:{port}", f"0.0.0.0:{port}", f"[::]:{port}", ""]
        for hosts in [*([one] for one in wrong), [], [f"localhost:{port}", "evil.example"]]:
            for path in ("/", "/data.json", "/none"):
                status, body = asked(port, path, hosts=hosts)
                assert (status, body.count(b"\n")) == (421, 1), (hosts, path)
                assert b"headline" not in body


def test_only_reading_and_only_two_addresses(compared):
    with serving(compared / "ifca" / "seed0") as (_, (_, port)):
        own = [f"localhost:{port}"]
        assert asked(port, "/", "HEAD", own) == (200, b"")
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"):
            assert asked(port, "/", method, own)[0] == 501, method
        for path in ("/../config.json", "/%2e%2e/config.json", "//etc/passwd", "/data.json/", "/page.css", "data.json",
                     f"http://evil.example:{port}/"):
            assert asked(port, path, "GET", own)[0] == 404, path
