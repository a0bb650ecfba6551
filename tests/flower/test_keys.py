"""Keys and certificates: what is made verifies, private files are private, and nothing is overwritten by accident."""

import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from coterie.errors import CoterieError
from coterie.flower import keys
from coterie.flower.keys import ClientKeys, ServerKeys


@pytest.fixture
def made(tmp_path):
    keys.make(tmp_path / "keys", ["Hub.example.org", "10.0.0.3", "[2001:db8::1]"], ["north", "south"])
    return tmp_path / "keys"


def everything(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def coterie(*words, cwd):
    command = [sys.executable, "-m", "coterie", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def handshake(server, ca, name):
    """A real TLS handshake over a socket pair: the client trusts `ca` alone and asks for `name`."""
    ours, theirs = socket.socketpair()
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(server / "server.crt", server / "server.key")

    def serve():
        try:
            there.wrap_socket(theirs, server_side=True).close()
        except (ssl.SSLError, OSError):
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ssl.create_default_context(cafile=ca).wrap_socket(ours, server_hostname=name) as secured:
            return secured.version()
    finally:
        ours.close()
        thread.join()


# -- what is made -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["hub.example.org", "10.0.0.3", "2001:db8::1", "localhost", "127.0.0.1", "::1"]
)
def test_the_certificate_holds_for_every_host_and_for_loopback(made, name):
    """The named hosts, in lower case and without brackets, and loopback although nobody named it."""
    assert handshake(made / "server", made / "clients" / "north" / "ca.crt", name) in ("TLSv1.2", "TLSv1.3")


def test_other_hosts_and_other_cas_are_refused(made, tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError, match=r"other\.example\.org"):
        handshake(made / "server", made / "server" / "ca.crt", "other.example.org")
    keys.make(tmp_path / "others", ["hub.example.org"], [])
    with pytest.raises(ssl.SSLCertVerificationError, match=r"unable to get|signature|self-signed"):
        handshake(made / "server", tmp_path / "others" / "server" / "ca.crt", "hub.example.org")


def test_the_chain_verifies_by_a_second_library(made):
    """`cryptography` has its own verifier, stricter than OpenSSL's about extensions."""
    ca, own = keys.certificate(made / "ca" / "ca.crt"), keys.certificate(made / "server" / "server.crt")
    def verifier(name):
        return PolicyBuilder().store(Store([ca])).build_server_verifier(x509.DNSName(name))
    chain = verifier("hub.example.org").verify(own, [])
    assert chain == [own, ca]
    with pytest.raises(VerificationError):
        verifier("elsewhere.org").verify(own, [])


def test_the_names_are_dns_names_and_addresses_each_in_its_own_kind(made):
    """TLS compares addresses with SAN entries of kind IP only; as DNS names they would never match."""
    own = keys.certificate(made / "server" / "server.crt")
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["hub.example.org", "localhost"]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["10.0.0.3", "2001:db8::1", "127.0.0.1", "::1"]


def test_the_server_certificate_cannot_sign_others(made):
    def is_ca(path):
        return keys.certificate(path).extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert is_ca(made / "ca" / "ca.crt")
    assert not is_ca(made / "server" / "server.crt")


def test_the_times(made):
    """Ten years for the CA, two for the server; an hour before now, so that a slow clock accepts them."""
    now = datetime.now(UTC)
    for path, days in (("ca/ca.crt", 3650), ("server/server.crt", 730)):
        found = keys.certificate(made / path)
        assert abs(found.not_valid_after_utc - now - timedelta(days=days)) < timedelta(minutes=5)
        assert timedelta(minutes=55) < now - found.not_valid_before_utc < timedelta(minutes=65)
    assert ServerKeys.read(made / "server").days_left == 729  # some seconds of the 730th are gone


def test_a_clients_pair_is_what_flower_reads(made):
    """SuperNode and register command read OpenSSH's format, and ask for an elliptic curve; ours is P-384."""
    private = load_ssh_private_key((made / "clients/north/node.key").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    for path in ("clients/north/node.pub", "server/nodes/north.pub"):
        assert load_ssh_public_key((made / path).read_bytes()) == private.public_key()
        assert (made / path).read_text().endswith(" north\n")
    assert (made / "clients/north/node.key").read_bytes() != (made / "clients/south/node.key").read_bytes()


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_ssh_keygen_derives_the_same_public_key(made):
    command = ["ssh-keygen", "-y", "-f", made / "clients/north/node.key"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == (made / "clients/north/node.pub").read_text().split()[:2]


def test_private_keys_are_private(made):
    old = os.umask(0)  # the modes must not hang on the umask
    try:
        keys.make(made, [], ["east"])
        keys.renew(made, "server")
    finally:
        os.umask(old)
    secret = [path for path in made.rglob("*") if path.suffix == ".key"]
    assert len(secret) == 5  # CA, server, three clients
    for path in secret:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_each_recipient_gets_what_it_needs_and_no_more(made):
    found = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    assert found == {
        "ca/ca.key", "ca/ca.crt", "server/ca.crt", "server/server.crt", "server/server.key", "server/nodes/north.pub",
        "server/nodes/south.pub", "clients/north/ca.crt", "clients/north/node.key", "clients/north/node.pub",
        "clients/south/ca.crt", "clients/south/node.key", "clients/south/node.pub",
    }


# -- adding, refusing, renewing ---------------------------------------------------------------------------------------


def test_nothing_is_overwritten(made):
    before = everything(made)
    for hosts, clients, words in (
        (["hub.example.org"], [], "--renew server"),
        ([], ["north"], "--renew north"),
        ([], ["east", "south"], "--renew south"),  # east must not be made either
        (["hub.example.org"], ["east"], "--renew server"),
    ):
        with pytest.raises(CoterieError, match=words):
            keys.make(made, hosts, clients)
        assert everything(made) == before


def test_a_stray_key_is_not_overwritten(tmp_path):
    """The folder holds a CA's key without its certificate: not ours to replace."""
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca" / "ca.key").write_text("mine")
    with pytest.raises(CoterieError, match="exists already"):
        keys.make(tmp_path, ["localhost"], [])
    assert (tmp_path / "ca" / "ca.key").read_text() == "mine"


def test_a_client_is_added_later_without_touching_the_others(made):
    before = everything(made)
    said = keys.make(made, [], ["east"])
    after = everything(made)
    assert {path: after[path] for path in before} == before
    assert ClientKeys.read(made / "clients" / "east").name == "east"
    assert sorted(ServerKeys.read(made / "server").nodes) == ["east", "north", "south"]
    assert "restart the server" in said[-1]


def test_the_server_is_renewed_for_the_same_hosts_and_the_same_ca(made):
    before = everything(made)
    said = " ".join(keys.renew(made, "server"))
    changed = {str(path.relative_to(made)) for path, content in everything(made).items() if before[path] != content}
    assert changed == {"server/server.crt", "server/server.key"}
    assert "restart" in said
    for name in ("hub.example.org", "10.0.0.3", "127.0.0.1"):  # the sites' old ca.crt is enough
        handshake(made / "server", made / "clients" / "north" / "ca.crt", name)
    keys.renew(made, "server", ["new.example.org"])
    assert keys.names_of(keys.certificate(made / "server/server.crt"))[0] == "new.example.org"
    assert "hub.example.org" not in keys.names_of(keys.certificate(made / "server/server.crt"))


def test_one_client_is_renewed(made):
    before = everything(made)
    said = " ".join(keys.renew(made, "north"))
    changed = {str(path.relative_to(made)) for path, content in everything(made).items() if before[path] != content}
    assert changed == {"clients/north/node.key", "clients/north/node.pub", "server/nodes/north.pub"}
    assert "old key is refused" in said
    assert ClientKeys.read(made / "clients" / "north").name == "north"


@pytest.mark.parametrize(
    ("hosts", "clients", "words"),
    [
        ([], [], "name the server's hosts"),
        ([], ["a"], "holds no keys yet"),
        (["http://x"], [], "neither a host name nor an IP address"),
        (["x:8000"], [], "neither a host name nor an IP address"),
        (["300.1.1.1"], [], "neither a host name nor an IP address"),
        (["x"], ["a/b"], "cannot name a client"),
        (["x"], ["../a"], "cannot name a client"),
        (["x"], ["server"], "cannot name a client"),
        (["x"], ["a", "a"], "named twice"),
    ],
)
def test_bad_requests_write_nothing(tmp_path, hosts, clients, words):
    with pytest.raises(CoterieError, match=words):
        keys.make(tmp_path / "keys", hosts, clients)
    assert not (tmp_path / "keys").exists()


def test_bad_renewals(made, tmp_path):
    with pytest.raises(CoterieError, match="there: north, south"):
        keys.renew(made, "west")
    with pytest.raises(CoterieError, match="names no host"):
        keys.renew(made, "north", ["x"])
    with pytest.raises(CoterieError, match="holds no keys"):
        keys.renew(tmp_path / "nowhere", "server")
    (made / "ca" / "ca.key").unlink()  # it is kept elsewhere, offline
    with pytest.raises(CoterieError, match="nothing can be signed"):
        keys.renew(made, "server")
    keys.renew(made, "north")  # a client's key is not signed


# -- reading ----------------------------------------------------------------------------------------------------------


def test_the_folders_read_back(made):
    server, north = ServerKeys.read(made / "server"), ClientKeys.read(made / "clients" / "north")
    assert list(server.nodes) == ["north", "south"]
    assert (north.name, north.key) == ("north", made / "clients/north/node.key")


def test_damaged_folders_are_refused_in_a_sentence(made, tmp_path):
    def spoiled(change, words, who="server"):
        copy = tmp_path / "copy"
        shutil.copytree(made, copy)
        change(copy)
        with pytest.raises(CoterieError, match=words):
            ServerKeys.read(copy / "server") if who == "server" else ClientKeys.read(copy / "clients" / who)
        shutil.rmtree(copy)

    other = tmp_path / "other"
    keys.make(other, ["hub.example.org"], ["north"])
    spoiled(lambda c: (c / "server/server.key").unlink(), r"has no server\.key")
    spoiled(lambda c: (c / "server/server.key").chmod(0o640), "chmod 600")
    spoiled(lambda c: shutil.copy(other / "server/ca.crt", c / "server/ca.crt"), "was not signed by")
    spoiled(lambda c: shutil.copy(other / "server/server.key", c / "server/server.key"), "does not belong to")
    spoiled(lambda c: (c / "server/server.crt").write_text("x"), "not a certificate")
    spoiled(lambda c: (c / "server/nodes/north.pub").write_text("x"), "not a public key")
    spoiled(lambda c: shutil.copy(c / "server/nodes/north.pub", c / "server/nodes/west.pub"), "same public key")
    spoiled(lambda c: (c / "clients/north/node.key").chmod(0o644), "chmod 600", "north")
    spoiled(lambda c: (c / "clients/north/node.key").write_text("x"), "damaged", "north")
    spoiled(lambda c: shutil.copy(c / "clients/south/node.key", c / "clients/north/node.key"), "not a pair", "north")


@pytest.mark.parametrize(("days", "words"), [(-1, "ended on"), (731, "ended on")])
def test_a_certificate_that_ended_is_refused(made, monkeypatch, days, words):
    """Either it was made for a time that is over, or time has gone by."""
    if days < 0:
        monkeypatch.setattr(keys, "SERVER_DAYS", 0)  # from an hour ago until now
        keys.renew(made, "server")
        with pytest.raises(CoterieError, match=words):
            ServerKeys.read(made / "server")
    else:
        class Later(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.now(tz) + timedelta(days=days)

        monkeypatch.setattr(keys, "datetime", Later)
        with pytest.raises(CoterieError, match=words):
            ServerKeys.read(made / "server")


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path):
    done = coterie("keys", "k", "--server", "hub.example.org,10.0.0.3", "--clients", "a", "b", "c,d", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "k/clients").iterdir()) == ["a", "b", "c", "d"]
    lines = done.stdout.splitlines()
    assert len(lines) == 6  # CA, server, four clients
    assert lines[0].startswith("k/ca: keep it offline")
    assert lines[1].startswith("k/server: goes to the server")
    assert lines[2] == "k/clients/a: goes to site a and to nobody else."
    again = coterie("keys", "k", "--clients", "a", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.startswith("coterie: k/clients/a exists already")
    assert coterie("keys", "k", "--renew", "a", cwd=tmp_path).returncode == 0


def test_without_the_package_the_command_says_what_to_install(tmp_path):
    (tmp_path / "cryptography.py").write_text("raise ModuleNotFoundError('cryptography')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "coterie", "keys", "k", "--server", "x"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("run: pip install 'coterie[flower]'")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "k").exists()
