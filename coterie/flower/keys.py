"""Certificates and keys: one certificate authority, one server certificate, one key pair per client.

`coterie keys DIR` writes one folder per recipient, so that a whole folder is handed over:

    DIR/ca/             ca.key, ca.crt                      stays with whoever made it, offline
    DIR/server/         ca.crt, server.crt, server.key,     goes to the server
                        nodes/NAME.pub                      the public keys it admits
    DIR/clients/NAME/   ca.crt, node.key, node.pub          goes to site NAME

The certificates are X.509 with ECDSA P-384 keys. The server's names its hosts as SAN; localhost, 127.0.0.1 and ::1 are
always among them, because the SuperLink's own helper processes reach it there. A client's pair is ECDSA P-384 in
OpenSSH's format, what `ssh-keygen -t ecdsa -b 384` writes. Private keys have file mode 0600 and no passphrase.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from coterie.errors import CoterieError
from coterie.flower import missing

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ModuleNotFoundError as reason:
    raise missing("cryptography") from reason

LOOPBACK = ("localhost", "127.0.0.1", "::1")
CA_DAYS = 3650
SERVER_DAYS = 730
WARN_DAYS = 30
"""A server certificate with less time left than this is worth a warning."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_RESERVED = ("ca", "server")
_T = TypeVar("_T")


# -- making them ------------------------------------------------------------------------------------------------------


def make(folder: Path, hosts: Sequence[str], clients: Sequence[str]) -> list[str]:
    """Make whatever is asked for, and a CA if there is none yet; the lines say which folder goes to whom.

    Nothing that exists is overwritten: if one of the files is there, nothing is written at all.
    """
    names = [_client_name(name) for name in clients]
    hosts = [_host(host) for host in hosts]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise CoterieError(f"the client {doubled[0]} is named twice.")
    if not hosts and not names:
        raise CoterieError("name the server's hosts (--server HOST,...), clients (--clients NAME,...) or both.")
    fresh = not (folder / "ca" / "ca.crt").exists()
    if fresh and not hosts:
        raise CoterieError(f"{folder} holds no keys yet; name the server's hosts too (--server HOST,...).")
    if not fresh and hosts and (folder / "server" / "server.key").exists():
        raise CoterieError(f"{folder / 'server'} holds a server key already; `--renew server` replaces it.")
    for name in names:
        for path in (folder / "clients" / name, folder / "server" / "nodes" / f"{name}.pub"):
            if path.exists():
                raise CoterieError(f"{path} exists already; `--renew {name}` replaces that client's key.")
    for path in [folder / part / file for part, file in (("ca", "ca.key"), ("server", "server.key")) if fresh]:
        if path.exists():
            raise CoterieError(f"{path} exists already; choose another folder.")
    return _writing(folder, lambda: _make(folder, hosts, names, fresh))


def _make(folder: Path, hosts: Sequence[str], names: Sequence[str], fresh: bool) -> list[str]:
    said = []
    if fresh:
        _make_ca(folder)
        said.append(f"{folder / 'ca'}: keep it offline; whoever has ca.key can pose as the server.")
    if hosts:
        _make_server(folder, hosts)
        until = certificate(folder / "server" / "server.crt").not_valid_after_utc
        said.append(f"{folder / 'server'}: goes to the server, valid until {until:%Y-%m-%d} for {', '.join(hosts)}.")
    for name in names:
        _make_client(folder, name)
        said.append(f"{folder / 'clients' / name}: goes to site {name} and to nobody else.")
    if names and not hosts:
        nodes = ", ".join(f"nodes/{name}.pub" for name in names)
        said.append(f"Copy {nodes} from {folder / 'server'} to the server too, and restart the server.")
    return said


def renew(folder: Path, who: str, hosts: Sequence[str] = ()) -> list[str]:
    """Replace key and certificate of the server (`who` is "server") or a client's key, and say what to do then."""
    hosts = [_host(host) for host in hosts]
    if not (folder / "ca" / "ca.crt").exists():
        raise CoterieError(f"{folder} holds no keys: it has no ca/ca.crt.")
    if who == "server":
        return _writing(folder, lambda: _renew_server(folder, hosts))
    if hosts:
        raise CoterieError("--server goes with --renew server; a client's key names no host.")
    if not (folder / "clients" / who / "node.key").exists():
        known = ", ".join(sorted(path.parent.name for path in folder.glob("clients/*/node.key"))) or "none"
        raise CoterieError(f"there is no client '{who}' in {folder} (there: {known}); --clients {who} makes one.")
    return _writing(folder, lambda: _renew_client(folder, who))


def _renew_server(folder: Path, hosts: Sequence[str]) -> list[str]:
    old = folder / "server" / "server.crt"
    if not hosts and not old.exists():
        raise CoterieError(f"{old} is missing, so name the server's hosts (--server HOST,...).")
    _make_server(folder, hosts or names_of(certificate(old)), replace=True)
    until = certificate(old).not_valid_after_utc
    return [
        f"{folder / 'server'}: new key and certificate, valid until {until:%Y-%m-%d}.",
        "Copy server.crt and server.key to the server and restart it. The sites need nothing: the CA is the same.",
    ]


def _renew_client(folder: Path, name: str) -> list[str]:
    _make_client(folder, name, replace=True)
    return [
        f"{folder / 'clients' / name}: a new key; give node.key and node.pub to site {name} and to nobody else.",
        f"Copy {folder / 'server' / 'nodes' / (name + '.pub')} to the server and restart it; the old key is "
        f"refused from then on. Then restart site {name}.",
    ]


def _make_ca(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coterie CA")])
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )
    built = (
        _draft(name, name, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA384())
    )
    _write(folder / "ca" / "ca.key", _pem(key), secret=True)
    _write(folder / "ca" / "ca.crt", built.public_bytes(serialization.Encoding.PEM))


def _make_server(folder: Path, hosts: Sequence[str], replace: bool = False) -> None:
    ca, signer = _ca(folder)
    key = ec.generate_private_key(ec.SECP384R1())
    names = list(dict.fromkeys([*hosts, *LOOPBACK]))
    common = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    built = (
        _draft(common, ca.subject, key.public_key(), SERVER_DAYS, latest=ca.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_san(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )
    _write(folder / "server" / "server.key", _pem(key), secret=True, replace=replace)
    _write(folder / "server" / "server.crt", built.public_bytes(serialization.Encoding.PEM), replace=replace)
    _write(folder / "server" / "ca.crt", (folder / "ca" / "ca.crt").read_bytes(), replace=True)
    (folder / "server" / "nodes").mkdir(exist_ok=True)


def _make_client(folder: Path, name: str, replace: bool = False) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    line = public + f" {name}\n".encode()
    site = folder / "clients" / name
    _write(site / "node.key", private, secret=True, replace=replace)
    _write(site / "node.pub", line, replace=replace)
    _write(site / "ca.crt", (folder / "ca" / "ca.crt").read_bytes(), replace=True)
    _write(folder / "server" / "nodes" / f"{name}.pub", line, replace=replace)


def _draft(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int, latest: datetime | None = None
) -> x509.CertificateBuilder:
    now = datetime.now(UTC).replace(microsecond=0)
    until = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject).issuer_name(issuer).public_key(public).serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of sites differ a little
        .not_valid_after(min(until, latest) if latest is not None else until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _ca(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    path = folder / "ca" / "ca.key"
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as reason:
        raise CoterieError(f"the CA's key {path} is missing or damaged, so nothing can be signed.") from reason
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CoterieError(f"{path} is not an elliptic-curve key.")
    return certificate(folder / "ca" / "ca.crt"), key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, secret: bool = False, replace: bool = False) -> None:
    """A new file, or with `replace` one that takes the old one's place in one step. Private keys are born with 0600."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = path.with_name(path.name + ".new") if replace else path
    if replace:
        target.unlink(missing_ok=True)
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if replace:
        os.replace(target, path)


def _writing(folder: Path, work: Callable[[], _T]) -> _T:
    try:
        return work()
    except OSError as reason:
        cause = (reason.strerror or str(reason)).lower()
        raise CoterieError(f"the keys in {folder} cannot be written: {cause}.") from reason


# -- names ------------------------------------------------------------------------------------------------------------


def listed(given: Iterable[str]) -> list[str]:
    """Names from words that may hold several, separated by commas."""
    return [name for word in given for name in (part.strip() for part in word.split(",")) if name]


def _client_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise CoterieError(
            f"'{name}' cannot name a client: at most 63 letters, digits, '.', '_' and '-', and not 'ca' or 'server'."
        )
    return name


def _host(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if len(host) > 253 or not _HOST.fullmatch(host) or re.fullmatch(r"[0-9.]+", host):
            raise CoterieError(f"'{host}' is neither a host name nor an IP address (without port).") from None
        return host.lower()


def _san(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def names_of(found: x509.Certificate) -> list[str]:
    """The hosts a certificate is valid for, in its order."""
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


# -- reading them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerKeys:
    """What the server needs: the CA's certificate, its own certificate and key, and the public keys it admits."""

    ca: Path
    certificate: Path
    key: Path
    nodes: dict[str, Path]

    @classmethod
    def read(cls, folder: Path) -> ServerKeys:
        """The keys in `folder` (what `coterie keys` wrote to DIR/server), checked."""
        ca_file, own_file, key_file = _present(folder, "ca.crt", "server.crt", "server.key")
        nodes = {path.stem: path for path in sorted((folder / "nodes").glob("*.pub"))}
        found = cls(ca_file, own_file, key_file, nodes)
        _private(found.key)
        own, ca = certificate(found.certificate), certificate(found.ca)
        try:
            own.verify_directly_issued_by(ca)
        except Exception as reason:
            raise CoterieError(f"{found.certificate} was not signed by {found.ca}.") from reason
        try:
            key = serialization.load_pem_private_key(found.key.read_bytes(), None)
        except (OSError, ValueError, TypeError) as reason:
            raise CoterieError(f"{found.key} is damaged or has a passphrase.") from reason
        if key.public_key() != own.public_key():
            raise CoterieError(f"{found.key} does not belong to {found.certificate}.")
        for path in (found.certificate, found.ca):
            _still_valid(path)
        if "127.0.0.1" not in names_of(own):
            raise CoterieError(f"{found.certificate} must also name 127.0.0.1: the server's own helpers connect there.")
        public = [public_key(path) for path in found.nodes.values()]
        for number, (name, line) in enumerate(zip(found.nodes, public)):
            if line in public[:number]:
                other = list(found.nodes)[public.index(line)]
                raise CoterieError(f"the clients {other} and {name} have the same public key.")
        return found

    @property
    def days_left(self) -> int:
        """Whole days until the server's certificate ends."""
        return (certificate(self.certificate).not_valid_after_utc - datetime.now(UTC)).days


@dataclass(frozen=True)
class ClientKeys:
    """What a site needs: the CA's certificate, by which it knows the server, and its own key."""

    ca: Path
    key: Path
    name: str

    @classmethod
    def read(cls, folder: Path) -> ClientKeys:
        """The keys in `folder` (what `coterie keys` wrote to DIR/clients/NAME), checked."""
        ca, key, public = _present(folder, "ca.crt", "node.key", "node.pub")
        _private(key)
        _still_valid(ca)
        try:
            own = serialization.load_ssh_private_key(key.read_bytes(), None)
        except (OSError, ValueError, TypeError) as reason:
            raise CoterieError(f"{key} is damaged or has a passphrase.") from reason
        if not isinstance(own, ec.EllipticCurvePrivateKey) or own.curve.name != "secp384r1":
            raise CoterieError(f"{key} is not an ECDSA P-384 key.")
        line = own.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        if line != public_key(public):
            raise CoterieError(f"{key} and {public} are not a pair.")
        words = public.read_text().split()
        return cls(ca, key, words[2] if len(words) > 2 else folder.resolve().name)


def certificate(path: Path) -> x509.Certificate:
    """The certificate in a PEM file."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as reason:
        raise CoterieError(f"the certificate {path} cannot be read: {(reason.strerror or '').lower()}.") from reason
    except ValueError as reason:
        raise CoterieError(f"{path} is not a certificate in PEM format.") from reason


def public_key(path: Path) -> bytes:
    """The public key in a .pub file, without the comment: `ecdsa-sha2-nistp384 AAAA...`."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as reason:
        raise CoterieError(f"{path} is not a public key in OpenSSH's format.") from reason
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise CoterieError(f"{path} is not an ECDSA P-384 key.")
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def public_pem(path: Path) -> bytes:
    """The public key in a .pub file as SuperNodes send it, in PEM."""
    key = serialization.load_ssh_public_key(public_key(path))
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _present(folder: Path, *names: str) -> list[Path]:
    paths = [folder / name for name in names]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        hint = "`coterie keys` makes the folders of the server and the sites"
        raise CoterieError(f"{folder} has no {', '.join(absent)}; {hint}.")
    return paths


def _private(path: Path) -> None:
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise CoterieError(f"others can read the private key {path}; run: chmod 600 {path}")


def _still_valid(path: Path) -> None:
    found, now = certificate(path), datetime.now(UTC)
    if now > found.not_valid_after_utc:
        when = f"{found.not_valid_after_utc:%Y-%m-%d}"
        raise CoterieError(f"{path} ended on {when}; `coterie keys DIR --renew server` makes a new one.")
    if now < found.not_valid_before_utc:
        when = f"{found.not_valid_before_utc:%Y-%m-%d}"
        raise CoterieError(f"{path} is not valid before {when}; is this machine's clock right?")
