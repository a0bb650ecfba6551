"""Training across real sites: keys, server, client, status."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live as Refreshed

from coterie.cli.app import command, screen
from coterie.cli.arguments import RoundOption
from coterie.errors import CoterieError, tell
from coterie.trust import code


@command("keys")
def keys_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the folders of CA, server and clients lie.")],
    more: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Further clients.")] = None,
    server: Annotated[
        list[str] | None, typer.Option("--server", metavar="HOST[,HOST...]", help="Names and addresses of the server.")
    ] = None,
    clients: Annotated[
        list[str] | None, typer.Option("--clients", metavar="NAME[,NAME...]", help="Sites that get a key.")
    ] = None,
    renew: Annotated[
        str | None, typer.Option("--renew", metavar="server|NAME", help="Replace what the server or a client has.")
    ] = None,
) -> None:
    """Flower: make keys for a server and its sites.

    Certificates and keys, and what goes to whom.
    """
    from coterie.flower import keys

    if more and not clients:
        raise CoterieError(f"clients are named after --clients: coterie keys {folder} --clients {' '.join(more)}")
    hosts, names = keys.listed(server or ()), keys.listed([*(clients or ()), *(more or ())])
    if renew is not None and names:
        raise CoterieError("--renew replaces one key; --clients makes new ones. Use one at a time.")
    said = keys.make(folder, hosts, names) if renew is None else keys.renew(folder, renew, hosts)
    tell("\n".join(said))


@command("server")
def server_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file: method, model, shape, classes, ...")],
    out: Annotated[Path, typer.Option("--out", help="The run's folder; started on it again, the run goes on.")],
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where sites connect; others than loopback are named.")
    ] = "127.0.0.1:8000",
    keys: Annotated[Path | None, typer.Option("--keys", help="The folder `server` of `coterie keys`.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: for trials on one machine.")] = False,
    keep_messages: Annotated[
        bool, typer.Option("--keep-messages", help="Keep everything that sites send in OUT/messages.")
    ] = False,
) -> None:
    """Flower: train across real sites, as the server.

    Starts the server, admits the sites' keys, and runs the experiment to its end.
    """
    from coterie.flower import operator

    operator.serve(config, out, listen, keys, insecure, keep_messages)


@command("client")
def client_command(
    data: Annotated[
        str | None, typer.Option("--data", help="The site's samples; they stay where they are.")
    ] = None,
    server: Annotated[str | None, typer.Option("--server", metavar="HOST:PORT", help="Where to connect.")] = None,
    keys: Annotated[Path | None, typer.Option("--keys", help="The site's folder of `coterie keys`.")] = None,
    home: Annotated[Path, typer.Option("--home", help="Where the site keeps its state and its model.")] = Path("site"),
    name: Annotated[str | None, typer.Option("--name", help="The site's name, where no key gives it.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: for trials on one machine.")] = False,
    dry_run: Annotated[
        Path | None, typer.Option("--dry-run", metavar="CONFIG", help="Print what would be sent in this experiment.")
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option("--accept", metavar="DIGEST", help="Approve an experiment, as --dry-run prints it; any: all."),
    ] = None,
    changes: Annotated[
        str, typer.Option("--accept-changes", metavar="LR,ROUNDS,...", help="Training options that may differ from it.")
    ] = "",
    limit: Annotated[
        str, typer.Option("--limit", metavar="NAME=NUMBER,...", help="The most a task may ask for: epochs=20, ...")
    ] = "",
    predict: Annotated[bool, typer.Option("--predict", help="Apply the site's model to --data instead.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Where --predict writes its csv file.")] = None,
    when: RoundOption = "chosen",
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")] = "auto",
    val: Annotated[float, typer.Option("--val", help="Share of the training samples held back for validation.")] = 0.1,
    test: Annotated[float, typer.Option("--test", help="Share of the samples held back for testing.")] = 0.25,
    seed: Annotated[int, typer.Option("--seed", help="Seed of that split.")] = 0,
) -> None:
    """Flower: take part in a training, as a site.

    Or show what would be sent (--dry-run), approve it (--accept), or use the site's model (--predict).
    """
    from coterie.flower import consent, operator

    settings = {"device": device, "val": val, "test": test, "seed": seed, "limit": limit}
    consent.SiteLimits.of(limit)
    digests = [text for text in accept or () if text != consent.ANY]
    if changes and not digests:
        raise CoterieError("--accept-changes says what may differ from an experiment; name it with --accept DIGEST.")
    for approval in consent.Consent(home).accept(digests, changes) if digests else ():
        tell(f"{home}/{consent.ACCEPTED} approves {approval}")
    if data is None:
        if digests and server is None and dry_run is None and not predict:
            return
        raise CoterieError("where are the site's samples? Give --data FILE.")
    code.typed(data)
    if predict:
        path, accuracy = operator.predict(home, data, out, when=when)
        tell(f"{path}" + ("" if accuracy is None else f": accuracy {100 * accuracy:.1f} % of the labels in {data}"))
        tell(operator.model_of(home, when=when)[1])
    elif dry_run is not None:
        with tempfile.TemporaryDirectory() as folder:
            job, parcels = operator.rehearse(dry_run, data, Path(folder), name or "this-site", settings)
        consent.Consent(home).show(job)
        screen().print(operator.sending(parcels))
        tell(f"approve it with: coterie client --accept {job.digest} --home {home}")
    elif server is None:
        raise CoterieError("where is the server? Give --server HOST:PORT (or --dry-run CONFIG, or --predict).")
    else:
        if consent.ANY in (accept or ()):
            settings["accept"] = consent.ANY
        operator.connect(server, data, home, keys, insecure, name, settings)


@command("status")
def status_command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of `coterie server --out`.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on showing it, until ctrl-C.")] = False,
    lift: Annotated[str | None, typer.Option("--lift", metavar="SITE", help="End a site's quarantine.")] = None,
) -> None:
    """Flower: say how far the server's run is.

    Who is connected, who answered, and who is quarantined.
    """
    from coterie.flower import operator

    if lift is not None:
        operator.lift(folder, lift)
        tell(f"{lift} takes part again from the next round on")
        return
    wide = screen()
    if not follow:
        wide.print(operator.status(folder))
        return
    with Refreshed(operator.status(folder), console=wide, auto_refresh=False) as shown:
        while True:
            time.sleep(1)
            shown.update(operator.status(folder), refresh=True)
