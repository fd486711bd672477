"""The `holdfast` command: names, options and help texts; the work is in one file per family.

The commands that only look (`status`, `report`, `ls`, `inspect`, `verify`, `groups`, `plan`, `doctor`) never load torch or numpy and answer at
once. The list of options is frozen by a test: a new one needs a reason there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast import __version__
from holdfast.base.errors import UsageError
from holdfast.cli import doctor as doctor_tool
from holdfast.cli import groups_command as groups_tool
from holdfast.cli import report as report_tool
from holdfast.cli import status as status_tool
from holdfast.cli import subcommands
from holdfast.cli import timeline as trace_tool
from holdfast.cli.command_options import Json, RanksPerNode, Root, RunningJob, VersionName, takes
from holdfast.cli.console import USAGE, error_text, errors_shown, say, whole_output
from holdfast.cli.planning import interval_advice
from holdfast.cli.planning import pipeline_plan as pipeline_tool
from holdfast.cli.planning import plan as plan_tool
from holdfast.cli.stored import export as export_tool
from holdfast.cli.stored import remove as remove_tool
from holdfast.cli.stored import versions as versions_tool

HELP = """Keeps distributed PyTorch training alive.

State is saved into host memory at every step, kept twice, written to storage in the background, and brought back from
the nearest copy when a process or a node is lost.

\b
Examples
  holdfast demo                                 see it happen on this machine, in two minutes
  holdfast run --nproc-per-node 8 train.py      torchrun, with a keeper beside it
  holdfast prove train.py -- --epochs 1         is this script the same after a kill, at every step?
  holdfast status --watch 2                     what is safe right now, and where
  holdfast report                               where the time of the last run went, and its incidents
  holdfast ls /ckpts/run1                       which versions are durable
  holdfast verify /ckpts/run1                   read every byte and prove it
  holdfast rm /ckpts/run1 --abandoned           remove what fresh starts left behind
  holdfast groups /ckpts/run1                   who held the same, and what lived in one node only
  holdfast plan job.toml                        what a job will hold, write, back up, and lose with a node
  holdfast doctor /ckpts/run1                   can this machine and this path keep the promises?

\b
Exit codes: 0 good, 1 a problem was found, 2 wrong usage. Results on standard output, progress on standard error.
"""

app = typer.Typer(
    name="holdfast",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _show_version(wanted: bool) -> None:
    if wanted:
        say(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command(context_settings=PASS_THROUGH)
def run(context: typer.Context) -> None:
    """Run a training job: every flag of torchrun, and a keeper. `holdfast run --help` lists them.

    \b
    holdfast run --nproc-per-node 8 train.py --lr 3e-4
    holdfast run --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29400 train.py
    """
    subcommands.become("run", context.args)


@app.command(context_settings=PASS_THROUGH)
def demo(context: typer.Context) -> None:
    """Train on two simulated nodes, kill ranks and a node, and end bit for bit where an undisturbed run ends."""
    subcommands.become("demo", context.args)


@app.command(context_settings=PASS_THROUGH)
def drill(context: typer.Context) -> None:
    """Crash jobs on purpose, many times, and check every invariant: `drill crash`, `faults`, `power`, `soak`, `sim`."""
    subcommands.become("drill", context.args)


@app.command(context_settings=PASS_THROUGH)
def prove(context: typer.Context) -> None:
    """Run a script of yours undisturbed and with kills, and compare every step: `holdfast prove script.py -- args`.

    \b
    holdfast prove train.py -- --epochs 1
    holdfast prove --nproc-per-node 2 --kills 20 train.py -- --checkpoints {dir}
    """
    subcommands.become("prove", context.args)


@app.command()
def status(
    json: Json = False,
    watch: Annotated[
        float | None, typer.Option(min=0.1, max=86400, metavar="SECONDS", help="Refresh every SECONDS seconds.")
    ] = None,
    runtime_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Directory of the keepers' sockets.")] = None,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Print metrics as text for Prometheus.")] = False,
) -> None:
    """Show what the keepers of this machine hold, and how safe each version is.

    \b
    holdfast status
    holdfast status --json --watch 5 | jq .keepers[].status
    """
    with errors_shown(as_json=json):
        raise typer.Exit(
            status_tool.status(runtime_dir=runtime_dir, watch_s=watch, as_json=json, prometheus=prometheus)
        )


@app.command()
def report(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run id, a journal or its directory; else the newest.")
    ] = None,
    json: Json = False,
) -> None:
    """Show where every second of a run went: steps, stalls, detection, restart, reload, recomputed steps; and its
    incidents.

    Exit code 1: there were incidents, and the run has not ended well.

    \b
    holdfast report
    holdfast report run1 --json | jq .goodput
    """
    with errors_shown(as_json=json):
        raise typer.Exit(report_tool.report(run, as_json=json))


@app.command("ls")
def list_versions(root: Root, json: Json = False) -> None:
    """List the versions under ROOT: which are durable, how big, where each lineage came from.

    \b
    holdfast ls /ckpts/run1
    """
    with errors_shown(as_json=json):
        raise typer.Exit(versions_tool.list_versions(root, as_json=json))


@app.command("rm")
def remove_versions(
    root: Root,
    versions: Annotated[
        list[str] | None, typer.Argument(metavar="[VERSION...]", help="Versions as `holdfast ls` shows them.")
    ] = None,
    abandoned: Annotated[
        bool, typer.Option("--abandoned", help="Remove all versions of runs that a fresh start on this path ended.")
    ] = False,
    json: Json = False,
) -> None:
    """Remove versions that retention leaves alone, as it would: the commit first, then the files that it lists.

    Never what is pinned, or what a restart would go on from.

    \b
    holdfast rm /ckpts/run1 i000001-s0000000120
    holdfast rm /ckpts/run1 --abandoned
    """
    with errors_shown(as_json=json):
        raise typer.Exit(remove_tool.remove(root, versions or [], abandoned=abandoned, as_json=json))


@app.command()
def inspect(root: Root, version: VersionName = None, json: Json = False) -> None:
    """Show what is in a version: every entry with dtype, shape, extent and bundle, and the values. Newest by default.

    \b
    holdfast inspect /ckpts/run1
    holdfast inspect /ckpts/run1 i000001-s0000000120 --json | jq .entries[0]
    """
    with errors_shown(as_json=json):
        raise typer.Exit(versions_tool.inspect_version(root, version, as_json=json))


@app.command()
def verify(
    root: Root,
    version: VersionName = None,
    sha256: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a list of the good files' SHA-256, for other tools.")
    ] = None,
    json: Json = False,
) -> None:
    """Read every file of a version (of all, by default) and prove its bytes; names the damaged file and bytes.

    \b
    holdfast verify /ckpts/run1 && echo all good
    holdfast verify /ckpts/run1 --sha256 run1.sha256    # then, in a copy: sha256sum --check run1.sha256
    """
    with errors_shown(as_json=json):
        raise typer.Exit(versions_tool.verify_versions(root, version, as_json=json, sha256=sha256))


@app.command()
def groups(
    root: Annotated[
        str | None, typer.Argument(metavar="[ROOT]", help="The checkpoint directory; a running job if left out.")
    ] = None,
    version: VersionName = None,
    job: RunningJob = None,
    ranks_per_node: RanksPerNode = None,
    json: Json = False,
) -> None:
    """Show who holds the same in a version or a running job, which ranks are interchangeable, what lives in one node
    only.

    Exit code 1: there is one node only, so nothing but storage survives it.

    \b
    holdfast groups                               of the job that runs here
    holdfast groups /ckpts/run1
    holdfast groups /ckpts/run1 i000001-s0000000120 --ranks-per-node 8 --json | jq .groups[0].ranks
    """
    with errors_shown(as_json=json):
        raise typer.Exit(groups_tool.groups(root, version, job=job, ranks_per_node=ranks_per_node, as_json=json))


@app.command(epilog=pipeline_tool.HELP)
@takes(plan_tool.Options)
def plan(options: plan_tool.Options) -> None:
    """Predict what a job will hold, copy, write and back up, and what any lost node would cost. Nothing is started.

    Exit code 1: something would be lost with one node, or with those that are asked for. A replica on the next node protects what has no twin elsewhere.

    \b
    holdfast plan                                 of the job that runs here
    holdfast plan job.toml --mesh dp=16
    holdfast plan --from /ckpts/run1 --mesh 8x4 --ranks-per-node 8
    holdfast plan job.toml --lost-nodes 2,3
    holdfast plan job.toml --redundancy parity:8  with parity over 8 nodes in place of replicas
    holdfast plan job.toml --like run1            how often to save, after what run1 was like
    holdfast plan train.py --nnodes 2 --ranks-per-node 8 -- --width 4096
    holdfast plan --pipeline step.toml --html step.html
    \b
    A script runs once per rank, without memory, network or devices, up to its Checkpointer.restore().
    \b
    A description: replicate (the default), shard(0), strided_shard(0, 4), own, only(0) for each axis
      ranks_per_node = 8
      mesh = { pp = 2, dp = 2, tp = 4 }            # outermost first
      [[tensors]]
      name = "model.layers.{i}.wq.weight"
      repeat = 32
      stage = "pp"                                 # the i-th lies in stage i * pp / repeat
      dtype = "BF16"
      shape = [4096, 4096]
      place = { tp = "shard(0)" }
      [optimizer]
      states = ["exp_avg", "exp_avg_sq"]
      scalars = ["step"]
      dtype = "F32"
      place = { dp = "shard(0)" }                  # ZeRO-1
    """
    with errors_shown(as_json=options.json):
        if options.pipeline is not None or options.html is not None:
            raise typer.Exit(pipeline_tool.pipeline(options.pipeline, html=options.html, as_json=options.json))
        assumed = interval_advice.Assumptions(options.mtbf, options.step_time, options.save_time)
        if options.like is not None:
            assumed = interval_advice.as_observed(assumed, report_tool.observed(options.like)[1])
        raise typer.Exit(plan_tool.plan(options, assumed))


@app.command()
def trace(
    directories: Annotated[
        list[str], typer.Argument(metavar="DIR...", help="Directories that `--trace` wrote; journals too.")
    ],
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the page here; default DIR/timeline.html.")
    ] = None,
    perfetto: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the trace here; default DIR/timeline.json.")
    ] = None,
    json: Json = False,
) -> None:
    """Draw a timeline of a run: compute, bubbles, copies, replication, storage, faults and recoveries on one axis.

    Writes a page that needs nothing but a browser, and a trace for ui.perfetto.dev.

    \b
    holdfast run --trace traces/ --nproc-per-node 4 train.py && holdfast trace traces/
    """
    with errors_shown(as_json=json):
        raise typer.Exit(trace_tool.trace(directories, html=html, perfetto=perfetto, as_json=json))


@app.command()
def export(
    root: Root,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A file that does not exist yet (dcp: a directory).")],
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help="Format: safetensors, torch, dcp or mindspore.")
    ] = "safetensors",
    version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Version to export; the newest by default.")
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="PREFIX", help="Export only names that begin with PREFIX, such as model.")
    ] = "",
    json: Json = False,
) -> None:
    """Write a version as one file with whole tensors, whatever layout saved it. It loads without holdfast.

    \b
    holdfast export /ckpts/run1 run1.safetensors --only model.
    holdfast export /ckpts/run1 run1.pt --to torch --version i000001-s0000000120
    """
    with errors_shown(as_json=json):
        code = export_tool.export(root, out, form=to, version=version, only=only, as_json=json)
        raise typer.Exit(code)


@app.command()
def doctor(
    root: Annotated[str | None, typer.Argument(metavar="[ROOT]", help="A checkpoint path, existing or not.")] = None,
    json: Json = False,
) -> None:
    """Tell whether this machine, and ROOT if given, can keep the promises. Tries for real, and removes what it wrote.

    \b
    holdfast doctor /ckpts/run1
    """
    with errors_shown(as_json=json):
        raise typer.Exit(doctor_tool.doctor(root, as_json=json))


def main() -> None:
    """Entry point of the console script."""
    if len(sys.argv) > 1 and sys.argv[1] in subcommands.PROGRAMS:
        # Their arguments are not ours to parse: a script's `--json` or `--` must arrive as it was written.
        try:
            subcommands.become(sys.argv[1], sys.argv[2:])
        except UsageError as error:
            say(error_text(error), file=sys.stderr)
            sys.exit(USAGE)
    with whole_output():
        app()


if __name__ == "__main__":
    main()
