"""The command line: with remote_cli, the only reader of arguments and environment.

Results go to stdout, everything else to stderr. Exit status: 0 done, 2 the input is wrong,
1 it failed for another reason.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import pathlib
import platform
import sys
import typing
from collections.abc import Sequence
from typing import Annotated, Any, cast

import jax
import typer
from rich.console import Console

from jaxstate.errors import CapacityError, InputError, JaxStateError, PoolFullError
from jaxstate.models.quantized import Weights
from jaxstate.sampling import Sampling
from jaxstate.serving import ask as ask_command
from jaxstate.serving import (
    catalogue,
    compile_cache,
    demo_market,
    demo_questions,
    doctor_server,
    local_model,
    market,
    remote_ask,
    remote_cli,
    serve_command,
    serve_config,
    terminal,
    tokens_file,
)
from jaxstate.serving import doctor as doctor_command
from jaxstate.serving import render as render_command
from jaxstate.serving.grpc_server import ServerConfig
from jaxstate.serving.journal import Durability
from jaxstate.serving.open_session import MAX_HEADERS, MAX_REGISTERED
from jaxstate.serving.remote_cli import (
    Json,
    Server,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    client_of,
)
from jaxstate.serving.serve_sizes import Sizes
from jaxstate.serving.tls import Tls

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    name="jaxstate", add_completion=False, pretty_exceptions_enable=False,
    help="LLM sessions that stay on the device while data streams in.",
)
demo = typer.Typer(help="Things to see.")
app.add_typer(demo, name="demo")
app.add_typer(remote_cli.app)

_UsageError: Any = typer.BadParameter.__mro__[1]  # click's or typer's own, by version

CacheDir = Annotated[
    pathlib.Path | None,
    typer.Option(
        envvar="JAXSTATE_CACHE", show_default="the user's cache",
        help="Directory for weights and compiled programs.",
    ),
]


@app.command()
def pull(
    name: Annotated[
        str,
        typer.Argument(help="A known model, e.g. smollm2-135m, or organization/name of the hub."),
    ],
    cache_dir: CacheDir = None,
) -> None:
    """Fetch a model's weights into the cache and verify them; prints the file's path."""
    path = local_model.pull(name, _cache(cache_dir), _log())
    print(path)


@app.command()
def ask(
    prompt: Annotated[str, typer.Option(help="The question.")],
    model: Annotated[
        str | None,
        typer.Option(help="Name, GGUF file or Hugging Face directory.", show_default="a server"),
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Of the server, whose context the question is about.")
    ] = None,
    server: Server = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many tokens; 0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from this much probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop what is this much less likely.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the random draws.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    weights: Annotated[
        str, typer.Option(help="float, stored (as the GGUF file has them), int8 or int4.")
    ] = "float",
    as_json: Json = False,
    cache_dir: CacheDir = None,
) -> None:
    """Ask a model here, or a server, once; prints the answer as it comes."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    if model is None and not (server or session or os.environ.get("JAXSTATE_SERVER")):
        raise InputError("model: expected --model, or a server by --server, got neither")
    if model is None:
        remote = remote_ask.RemoteQuestion(
            session=session, prompt=prompt, raw=raw, max_new_tokens=max_new_tokens,
            sampling=sampling, stop=tuple(stop or ()),
        )  # fmt: skip
        with client_of(server, token_file, tls_ca, tls_cert, tls_key) as client:
            remote_ask.run(remote, client, as_json=as_json, out=Console(), log=_log())
        return
    if server is not None or session is not None:
        raise InputError("model: expected a model here or a server and its session, got both")
    question = ask_command.Question(
        model=model, prompt=prompt, raw=raw, max_new_tokens=max_new_tokens, sampling=sampling,
        stop=tuple(stop or ()), dtype=dtype, weights=cast(Weights, weights),
    )
    cache = _cache(cache_dir)
    compile_cache.enable(cache / "xla")
    ask_command.run(question, as_json=as_json, cache_dir=cache, out=Console(), log=_log())


@demo.command("market")
def demo_market_command(
    rounds: Annotated[int, typer.Option(min=1, max=market.ROUNDS)] = market.ROUNDS,
    model: Annotated[
        str, typer.Option(help="Name, GGUF file or Hugging Face directory.")
    ] = "smollm2-135m",
    plot: Annotated[
        pathlib.Path, typer.Option(help="Draw latency against context into this PNG.")
    ] = pathlib.Path("market.png"),
    as_json: Json = False,
    cache_dir: CacheDir = None,
) -> None:
    """Stream real candles into a session and time its answers against the usual ways."""
    cache = _cache(cache_dir)
    compile_cache.enable(cache / "xla")
    demo_market.run(
        model=model, rounds=rounds, as_json=as_json, plot=plot, cache_dir=cache,
        out=Console(), log=_log(),
    )


@demo.command("questions")
def demo_questions_command(
    rows: Annotated[
        int, typer.Option(min=1, help="Rows that come while questions are asked.")
    ] = 24,
    versions: Annotated[
        int, typer.Option(min=1, help="Rows before, from which the gates are calibrated.")
    ] = 1500,
    risk: Annotated[
        float, typer.Option(help="How often a gated answer may differ, 0.001 to 0.3.")
    ] = 0.05,
    every_s: Annotated[float, typer.Option(min=0, help="Seconds between rows.")] = 0.25,
    as_json: Json = False,
    cache_dir: CacheDir = None,
) -> None:
    """Register questions on candles; show where answers come from, and whether they are true."""
    cache = _cache(cache_dir)
    compile_cache.enable(cache / "xla")
    demo_questions.run(
        rows=rows, versions=versions, risk=risk, every_s=every_s, as_json=as_json,
        cache_dir=cache, out=Console(), log=_log(),
    )


def _read_config(context: typer.Context, path: pathlib.Path | None) -> pathlib.Path | None:
    """Have the values of a file stand for flags that are not given."""
    if path is not None:
        known = typing.get_type_hints(serve)
        del known["config"], known["return"]
        context.default_map = serve_config.read(path, known)
    return path


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Name, GGUF file or Hugging Face directory.")],
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; others than the loopback's need --tls-cert, --tls-key and "
            "--auth-tokens."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="For gRPC; 0 = any that is free.")
    ] = 50051,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="For the page and /metrics; 0 = any.")
    ] = 50052,
    metrics_host: Annotated[
        str | None,
        typer.Option(
            show_default="the host, or 127.0.0.1 if others reach that",
            help="Address of page and metrics, which show all tenants' sessions to whoever "
            "reaches them.",
        ),
    ] = None,
    tls_cert: Annotated[
        pathlib.Path | None, typer.Option(help="PEM file of the server's certificate, for TLS.")
    ] = None,
    tls_key: Annotated[
        pathlib.Path | None, typer.Option(help="PEM file of its key, without a password.")
    ] = None,
    tls_client_ca: Annotated[
        pathlib.Path | None,
        typer.Option(help="PEM file of who signs clients' certificates: all have to have one."),
    ] = None,
    auth_tokens: Annotated[
        pathlib.Path | None,
        typer.Option(
            show_default="whoever reaches the server",
            help="File of who may call, see `jaxstate token`; read again whenever it changes.",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            show_default="8192, or the model's",
            help="Longest context with a question and its answer, in tokens.",
        ),
    ] = None,
    kv_cells: Annotated[
        int | None,
        typer.Option(show_default="four contexts", help="Tokens of all contexts in memory."),
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens of a page of the pool.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    weights: Annotated[
        str, typer.Option(help="float, stored (as the GGUF file has them), int8 or int4.")
    ] = "float",
    prefix_share: Annotated[
        float, typer.Option(help="Share of the pool that keeps beginnings nobody uses, 0 to 1.")
    ] = 0.25,
    host_bytes: Annotated[
        int, typer.Option(help="Host memory for sessions that rest, and their copies.")
    ] = 0,
    swap_dir: Annotated[
        pathlib.Path | None, typer.Option(help="Directory for those that it has no room for.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients and metrics call the model.")
    ] = None,
    grace_s: Annotated[
        float, typer.Option(min=0, help="Seconds that calls have when the server is to end.")
    ] = 30.0,
    state_dir: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Directory where sessions outlive the process.",
            show_default="they end with it",
        ),
    ] = None,
    snapshot_dir: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Directory of sessions that clients save by name.",
            show_default="in --state-dir",
        ),
    ] = None,
    max_registered: Annotated[
        int, typer.Option(min=0, help="Questions that a session may have registered.")
    ] = MAX_REGISTERED,
    max_headers: Annotated[
        int, typer.Option(min=0, help="Headers that a session may have declared.")
    ] = MAX_HEADERS,
    durability: Annotated[
        str,
        typer.Option(
            help="full: what was acknowledged survives a power cut; normal: a killed process; off."
        ),
    ] = "full",
    force: Annotated[
        bool, typer.Option("--force", help="Let other machines in, whoever they are.")
    ] = False,
    config: Annotated[
        pathlib.Path | None,
        typer.Option(
            is_eager=True,
            callback=_read_config,
            help="TOML file with flags by their names; those given here win.",
        ),
    ] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Serve sessions of a model over gRPC, with a page and metrics beside it."""
    options = serve_command.ServeOptions(
        model=model, served_model_name=served_model_name, dtype=dtype,
        weights=cast(Weights, weights), metrics_port=metrics_port, metrics_host=metrics_host,
        tls=_tls(tls_cert, tls_key, tls_client_ca), auth_tokens=auth_tokens, force=force,
        state_dir=state_dir, snapshot_dir=snapshot_dir, durability=cast(Durability, durability),
        max_registered=max_registered, max_headers=max_headers,
        server=ServerConfig(host=host, port=port, grace_s=grace_s),
        sizes=Sizes(
            max_model_len=max_model_len, kv_cells=kv_cells, page_size=page_size,
            prefix_share=prefix_share, host_bytes=host_bytes,
            swap_dir=str(swap_dir) if swap_dir else None,
        ),
    )  # fmt: skip
    cache = _cache(cache_dir)
    compile_cache.enable(cache / "xla")
    serve_command.run(options, cache_dir=cache, out=Console(), log=_log())


@app.command()
def token(
    tenant: Annotated[str, typer.Argument(help="Who is to have it: letters, digits, and . _ -")],
    file: Annotated[pathlib.Path, typer.Option(help="Where its hash goes, see above.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Give a tenant another token; the old one ends.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Take the tenant out of the file instead.")
    ] = False,
) -> None:
    """Make a token for a tenant of `serve --auth-tokens FILE` and print it, this once.

    The file has a line of JSON for each tenant: its name, the token's SHA-256, and, written by
    hand, "certificates" (names in client certificates) and quotas: "max_sessions", "max_cells",
    "max_requests" (at once), "requests_per_s", "max_snapshots" (100 where it is not given). A
    server reads it again as soon as it changes.
    """
    if replace and remove:
        raise InputError("token: expected --replace or --remove, got both; leave one out")
    if remove:
        tokens_file.remove(file, tenant)
        terminal.say(_log(), f"tenant {tenant} is not let in any more; its sessions stay")
        return
    print(tokens_file.issue(file, tenant, replace=replace))
    terminal.say(_log(), f"this is the token of tenant {tenant}; {file} has only its hash")


@app.command()
def models(as_json: Json = False, cache_dir: CacheDir = None) -> None:
    """List the models that can be pulled and the families that are supported."""
    catalogue.run(as_json=as_json, cache_dir=_cache(cache_dir), out=Console())


@app.command()
def render(
    model: Annotated[str, typer.Argument(help="Name, GGUF file or Hugging Face directory.")],
    user: Annotated[str | None, typer.Option(help="A user's message.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before it.")] = None,
    messages: Annotated[
        pathlib.Path | None, typer.Option(help="JSON file with a list of messages.")
    ] = None,
    tools: Annotated[
        pathlib.Path | None, typer.Option(help="JSON file with a list of tools.")
    ] = None,
    open_ended: Annotated[
        bool, typer.Option("--open-ended", help="Leave out the header of the answer.")
    ] = False,
    as_json: Json = False,
    cache_dir: CacheDir = None,
) -> None:
    """Print the exact text and token ids of a conversation."""
    conversation = render_command.Conversation(
        system=system, user=user, messages=messages, tools=tools, open_ended=open_ended
    )
    render_command.run(
        model, conversation, as_json=as_json, cache_dir=_cache(cache_dir),
        out=Console(), log=_log(),
    )


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Name, GGUF file or Hugging Face directory.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens that must fit into memory.")
    ] = None,
    server: Server = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: Json = False,
    cache_dir: CacheDir = None,
) -> None:
    """Look whether a model fits, is whole, and computes what it should; exit status 1 if not.

    With --server, or without a model: whether a server answers, and what it serves.
    """
    sound = True
    if server is not None or model is None:
        with client_of(server, token_file, tls_ca, tls_cert, tls_key) as client:
            findings = doctor_server.examine(client, client.address)
            sound &= doctor_command.report(findings, as_json=as_json, out=Console())
    if model is not None:
        cache = _cache(cache_dir)
        compile_cache.enable(cache / "xla")
        sound &= doctor_command.run(
            model, dtype=dtype, context=context, as_json=as_json, cache_dir=cache,
            out=Console(), log=_log(),
        )  # fmt: skip
    if not sound:
        raise typer.Exit(FAILED)


@app.command()
def version() -> None:
    """Print the versions of this program and of what it stands on."""
    print(
        f"jaxstate {importlib.metadata.version('jaxstate')}, jax {jax.__version__}, "
        f"Python {platform.python_version()}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Args:
      argv: arguments without the program's name; those of the process if None.
    """
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        status = app(arguments, prog_name="jaxstate", standalone_mode=False) or DONE
        return _say("interrupted", status) if status == INTERRUPTED else status
    except _UsageError as error:
        where = error.ctx.command_path if error.ctx else "jaxstate"
        message = error.format_message().strip().rstrip(".")
        return _say(f"{message}; see `{where} --help`", WRONG_INPUT)
    except PoolFullError as error:  # for what comes later there may be room
        return _say(str(error), FAILED)
    except (CapacityError, ValueError) as error:
        return _say(str(error), WRONG_INPUT)
    except FileNotFoundError as error:
        name = f"{error.filename}: no such file or directory" if error.filename else str(error)
        return _say(name, WRONG_INPUT)
    except (JaxStateError, RuntimeError, OSError, MemoryError) as error:
        return _say(str(error) or type(error).__name__, FAILED)


def _say(message: str, status: int) -> int:
    """Print one sentence on stderr, whatever line breaks the message had."""
    print(f"jaxstate: {' '.join(message.split())}", file=sys.stderr)
    return status


def _tls(
    cert: pathlib.Path | None, key: pathlib.Path | None, client_ca: pathlib.Path | None
) -> Tls | None:
    if cert is not None and key is not None:
        return Tls(cert=cert, key=key, client_ca=client_ca)
    if cert or key or client_ca:
        raise ValueError("tls-cert and tls-key: expected both with any option of TLS; add them")
    return None


def _cache(cache_dir: pathlib.Path | None) -> pathlib.Path:
    return cache_dir if cache_dir is not None else local_model.default_cache_dir()


def _log() -> Console:
    return Console(stderr=True)
