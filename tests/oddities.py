"""The zoo of healthy oddities, and that of sick ones, as facts. Each stands for scripts that people write."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.elastic.worker_facts import DEBUGGER, PERSON, SLEEP, Phase
from oddities_kit import MB, STEPS, WAITS, Case, Way

E, D, S = Phase.EVALUATION, Phase.DATA, Phase.STEP
MANY_PLACES = ("generate (text.py)", "forward (model.py)", "decode (text.py)", "sample (text.py)")
LOOP = ("pass_over (train.py)",)
CALL = "a system call (no. 45)"
ANSWER, QUEUE, CHILD, FUTURE, STORE = "an answer", "another process or a queue", "a child", "a future", "a store"


def _alone(name: str, way: Way, *seconds: float, world: int = 2, **more: object) -> list[Case]:
    """Rank 0 alone, while all others wait for it in a collective; one case for each time."""
    return [Case(f"{name} for {s:g} s", {0: way}, (s,), world=world, **more) for s in seconds]  # type: ignore[arg-type]


COMPUTES = Way(busy=1.0, state="R", places=MANY_PLACES)
WRITES = Way(busy=0.05, file=80 * MB, wakes=30, places=LOOP)
THREADS = Way(spent=4.0)
CHILDREN = Way(family=3.0, waits_in=CHILD)
UPLOADS = Way(sockets=10 * MB)
POLLS = Way(busy=0.004, wakes=100, flickers="SSR", places=LOOP)
GRANTED = replace(WAITS, group_s=10800.0)
START = {"phase": Phase.START, "settled": False, "learned": False}

HEALTHY: list[Case] = [
    # Work that one rank does for all.
    *_alone("an evaluation", replace(COMPUTES, phase=E), 60, 600, 1700),
    *_alone("the first evaluation of eight ranks", replace(COMPUTES, phase=E), 1700, world=8),
    *_alone("an evaluation that waits for its device", Way(phase=E, device=True), 60, 850),
    *_alone("an evaluation that nobody announced", COMPUTES, 45, 300, 850),
    *_alone("text generation that nobody announced", COMPUTES, 1700),
    *_alone("text generation on a device, spinning", replace(COMPUTES, device=True), 1700),
    *_alone("an export with write()", WRITES, 45, 600, 1700),
    *_alone("an export of eight ranks", WRITES, 1700, world=8),
    *_alone("an export into a mapped file", Way(memory=30 * MB, flickers="RDD", busy=0.2), 45, 1700),
    *_alone("a plot", replace(COMPUTES, places=LOOP), 45, 300, 850),
    *_alone("a sort of an index in one call", replace(COMPUTES, places=LOOP), 850),
    *_alone("an index that grows in memory", replace(COMPUTES, places=LOOP, memory=20 * MB), 1700),
    *_alone("an upload of an artefact", UPLOADS, 45, 600, 1700),
    *_alone("an upload by a thread", replace(UPLOADS, waits_in=FUTURE), 1700),
    *_alone("an upload by a child", Way(sockets=5 * MB, file=5 * MB, waits_in=CHILD), 1700),
    *_alone("a slow upload of 30 KB/s", Way(sockets=30_000.0), 1700),
    *_alone("torch.save to slow storage", Way(phase=Phase.SAVING, file=2 * MB), 600, 1700),
    *_alone("torch.save that waits for a full disk cache", Way(phase=Phase.SAVING, flickers="DDDS", file=MB), 850, 1700),
    *_alone("a load of 100 GB", Way(phase=Phase.LOADING, file=200 * MB, busy=0.6), 600, 1700),
    # Threads and children.
    *_alone("its own thread compresses", replace(THREADS, waits_in=FUTURE), 15, 300, 1700),
    *_alone("tokenising in threads of Rust", THREADS, 300, 1700),
    *_alone("tokenising in processes", replace(CHILDREN, waits_in=QUEUE), 300, 1700),
    *_alone("ninja and its grandchildren", CHILDREN, 12, 300, 1700),
    *_alone("a child that computes, looked at a hundred times a second", replace(POLLS, family=1.0), 850, 3500),
    *_alone("a child that computes a little, looked at as often", replace(POLLS, family=0.1), 3500),
    *_alone("its own thread computes, looked at as often", replace(POLLS, spent=1.0), 3500),
    *_alone("a child that works on another machine", Way(waits_in=CHILD), 100, 850),
    *_alone("a loader's worker computes", Way(phase=D, stands=D, family=0.9), 100, 1700),
    *_alone("a loader's worker reads", Way(phase=D, stands=D, file=3 * MB), 100, 1700),
    *_alone("a loader's worker waits for one slow object", Way(phase=D, stands=D), 8, 60, 280),
    *_alone("a loader whose objects trickle", Way(phase=D, stands=D, sockets=20_000.0), 600, 1700),
    *_alone("a loader that forks its workers anew", Way(phase=D, stands=D, family=0.4, memory=5 * MB), 45, 400),
    # Waits of a rank's own choice.
    *_alone("a judge's answer", Way(waits_in=ANSWER), 10, 100, 400, 850),
    *_alone("a queue of roll-outs", Way(waits_in=QUEUE), 100, 850),
    *_alone("a future", Way(waits_in=FUTURE), 100, 850),
    *_alone("an object store that throttles", Way(waits_in=STORE), 100, 850),
    *_alone("time.sleep", Way(waits_in=SLEEP), 10, 100, 850),
    *_alone("recv, flock or waitpid in C", Way(call=CALL), 10, 130, 850),
    *_alone("flock of a rank that is woken by a look, and gets no processor", Way(call=CALL, flickers="SR"), 130, 850),
    *_alone("recv in a data set of the script's own", Way(call=CALL, phase=D, stands=D), 310, 850),
    *_alone("a call in C of one rank per node", Way(call=CALL), 850, world=8, here=1, stuck=True),
    *_alone("a server in C that waits for work", Way(call=CALL), 5000, world=1),
    Case("a server in C that others ask", {0: Way(call=CALL)}, (5000.0,), others=STEPS, world=4),
    *_alone("a file that is looked for ten times a second", Way(wakes=10, places=LOOP), 100, 850),
    *_alone("a file that is looked for once a second", Way(wakes=1, waits_in=SLEEP), 100, 850),
    *_alone("a wait that nothing explains", Way(), 3, 30, 110),
    # People.
    *_alone("pdb", Way(waits_in=DEBUGGER, places=("interaction (pdb.py)",)), 300, 5000),
    *_alone("gdb", Way(state="t"), 300, 5000),
    *_alone("strace", Way(flickers="tS", busy=0.1, wakes=9), 300),
    *_alone("py-spy that stops it now and then", Way(flickers="tSSR", busy=0.5), 600),
    *_alone("input()", Way(waits_in=PERSON), 300, 5000),
    *_alone("Ctrl-Z and fg", Way(state="T"), 1, 2.5),
    Case("breakpoint() in a job of one rank", {0: Way(waits_in=DEBUGGER)}, (5000.0,), world=1),
    Case("breakpoint() in a start", {0: Way(waits_in=DEBUGGER, **START)}, (5000.0,)),  # type: ignore[arg-type]
    Case("all ranks in pdb", dict.fromkeys((0, 1), Way(waits_in=DEBUGGER)), (5000.0,)),
    # The machine.
    *_alone("garbage collection", replace(COMPUTES, places=LOOP), 40, world=8),
    *_alone("swapping", Way(flickers="DDDDDDDS", file=3 * MB, busy=0.02), 100, 1700),
    *_alone("reads of a mapped file, in state D at many looks", Way(flickers="RRDR", file=1000 * MB, busy=0.9), 700, 1700),
    *_alone("a file server that reboots", Way(state="D"), 100, 300, 850),
    *_alone("a disk cache that is written back", Way(state="D", file=MB), 1700),
    *_alone("a rank that gets no processor", Way(starved=0.97, state="R", busy=0.02), 600, 1700),
    *_alone("a frozen control group", Way(state="F"), 60, 3600),
    Case("all ranks without a processor", dict.fromkeys(range(4), Way(starved=0.97, state="R")), (1700.0,), world=4),
    Case("all control groups frozen", dict.fromkeys(range(2), Way(state="F")), (3600.0,)),
    Case("a suspended laptop", dict.fromkeys(range(2), Way(late_s=3600.0)), (3610.0,)),
    Case("a suspended laptop, again and again", dict.fromkeys(range(2), Way(late_s=600.0)), (610.0, 610.0, 610.0)),
    *_alone("a watcher that was not run", Way(late_s=200.0), 250),
    *_alone("a clock that jumped", Way(late_s=1e6), 1e6 + 50),
    # Collectives.
    Case(
        "local SGD over a slow link",
        dict.fromkeys(range(2), replace(WAITS, spent=0.015, sockets=6 * MB)), (60.0, 90.0, 300.0, 1200.0),
    ),
    Case(
        "a slow link whose bytes cannot be seen",
        dict.fromkeys(range(2), replace(WAITS, sockets=None)), (55.0, 80.0, 110.0),
    ),
    Case("one huge message", dict.fromkeys(range(4), replace(WAITS, spent=0.6)), (110.0,), world=4),
    Case("one huge message, its bytes seen", dict.fromkeys(range(4), replace(WAITS, spent=0.6, sockets=MB)), (900.0,), world=4),
    Case("a switch that reboots", dict.fromkeys(range(2), WAITS), (50.0,)),
    Case("the others are not there yet", {0: WAITS, 1: WAITS}, (1700.0,), world=4, here=2),
    Case("a pipeline's first stage waits", {3: COMPUTES}, (850.0,), world=4),
    Case("two of four evaluate", {0: replace(COMPUTES, phase=E), 1: replace(COMPUTES, phase=E)}, (1700.0,), world=4),
    Case("gradients wait in backward", {0: COMPUTES}, (850.0,), others=Way(stands=Phase.COLLECTIVE)),
    Case("a rank saves alone", {1: Way(phase=Phase.SAVING)}, (850.0,), world=4),
    Case("many collectives before the first step, then one tokenises", {0: Way(busy=1.0, state="R", settled=False)}, (45.0, 600.0, 1700.0)),
    Case("one huge exchange before the first step", dict.fromkeys(range(2), replace(WAITS, settled=False)), (600.0,)),
    # One rank per node, and jobs of one rank.
    *_alone("one rank per node evaluates", replace(COMPUTES, phase=E), 850, world=8, here=1, stuck=True),
    *_alone("one rank per node exports", WRITES, 1700, world=8, here=1, stuck=True),
    *_alone("one rank per node waits for its device", Way(device=True), 850, world=8, here=1, stuck=True),
    *_alone("one rank per node is quiet", Way(), 110, world=8, here=1, stuck=True),
    *_alone("one rank per node is quiet and nobody is known to wait", Way(), 1700, world=8, here=1),
    *_alone("a job of one rank is quiet", Way(), 110, 850, world=1),
    *_alone("a job of one rank sleeps until there is work", Way(waits_in=SLEEP), 5000, world=1),
    *_alone("a job of one rank waits in a queue", Way(waits_in=QUEUE), 5000, world=1),
    *_alone("a job of one rank spins", replace(COMPUTES, places=LOOP), 5000, world=1),
    *_alone("a notebook", Way(waits_in=PERSON), 5000, world=1),
    # Not everybody does the same.
    Case("a server that others ask", {0: Way(waits_in=QUEUE)}, (5000.0,), others=STEPS, world=4),
    Case("a rank that logs for the others", {0: Way()}, (3500.0,), others=STEPS, world=4),
    Case("an evaluator beside trainers", {3: COMPUTES}, (5000.0,), others=STEPS, world=4),
    Case("the tail of a data-parallel epoch", {1: COMPUTES}, (3500.0,), gone=(0,)),
    Case("the tail of an epoch, quiet", {1: Way(waits_in=ANSWER)}, (3500.0,), gone=(0,)),
    Case("all wait for one storage", dict.fromkeys(range(4), Way(phase=D, stands=D)), (3500.0,), world=4),
    Case("all sleep until there is work", dict.fromkeys(range(4), Way(waits_in=SLEEP)), (5000.0,), world=4),
    Case("all evaluate without a collective", dict.fromkeys(range(4), replace(COMPUTES, phase=E)), (5000.0,), world=4),
    # A script that gave its group three hours: others may wait that long for what takes long.
    Case("all wait for each other in a group with a limit of three hours", dict.fromkeys(range(2), GRANTED), (5000.0,)),
    Case("the same, while their threads compute", dict.fromkeys(range(2), replace(GRANTED, spent=0.5)), (5000.0,)),
    *_alone("an answer, in a group with a limit of three hours", Way(waits_in=ANSWER, group_s=10800.0), 5000, others=GRANTED),
    *_alone("a call in C, in a group with a limit of three hours", Way(call=CALL), 5000, others=GRANTED),
    *_alone("one loop, in a group with a limit of three hours", replace(COMPUTES, places=LOOP), 5000, others=GRANTED),
    # Other frameworks, and starts.
    Case("JAX on sixteen cores", {0: Way(spent=16.0, wakes=0.5, **START)}, (4000.0,), world=1),  # type: ignore[arg-type]
    Case("JAX on a device", {0: Way(device=True, **START)}, (1700.0,), world=1),  # type: ignore[arg-type]
    Case("a wrapper that starts the program", {0: Way(family=1.0, waits_in=CHILD, **START)}, (5000.0,), world=1),  # type: ignore[arg-type]
    Case("a wrapper whose program idles", {0: Way(waits_in=CHILD, **START)}, (5000.0,), world=1),  # type: ignore[arg-type]
    Case("a download at the start", {0: Way(sockets=10 * MB, **START)}, (3500.0,)),  # type: ignore[arg-type]
    Case("an import from cold storage", {0: Way(file=MB, flickers="DS", **START)}, (3500.0,)),  # type: ignore[arg-type]
    Case("a start that is quiet", {0: Way(**START)}, (1700.0,)),  # type: ignore[arg-type]
    *_alone("compilation", Way(phase=Phase.COMPILE, busy=1.0, state="R"), 1000, 1700),
    *_alone("compilation that the stack shows", Way(stands=Phase.COMPILE, busy=1.0), 1000, 1700),
    *_alone("compilation in a subprocess pool", Way(phase=Phase.COMPILE, family=6.0), 1700),
    *_alone("the second step, which takes long", Way(learned=False), 280),
    # Pauses that return, each a little longer.
    Case("a pause that grows", {0: Way()}, (100.0, 140.0, 200.0, 290.0)),
    Case("a loader's pause that grows", {0: Way(phase=D, stands=D)}, (280.0, 400.0, 550.0)),
    Case("a save every hundred steps", {0: WRITES}, (45.0,) * 6, world=4),
]  # fmt: skip

LOCK = Way()


def _sick(name: str, way: Way, seconds: float = 1200.0, **more: object) -> list[Case]:
    """Rank 1 hangs, and all others wait for it: in a job of two ranks, and in one of eight."""
    return [
        Case(f"{name}, {world} ranks", {1: way}, (seconds,), world=world, **more)  # type: ignore[arg-type]
        for world in (2, 8)
    ]


SICK: list[Case] = [
    *(case for phase in Phase for case in _sick(f"stopped in {phase.name.lower()}", Way(state="T", phase=phase), 60.0)),
    *_sick("a lock in a step", LOCK),
    *_sick("a lock in a step, beside a thread that beats", Way(spent=0.01)),
    *_sick("a lock in a step, beside a thread that computes", Way(spent=0.1, places=LOOP), 4000.0),
    *_sick("a lock in an evaluation", Way(phase=E)),
    *_sick("a lock in a loader", Way(phase=D)),
    *_sick("workers of a loader that are dead", Way(phase=D, stands=D, wakes=0.2)),
    *_sick("a lock while saving", Way(phase=Phase.SAVING)),
    *_sick("a lock while loading", Way(phase=Phase.LOADING), 2000.0),
    *_sick("a lock while compiling", Way(phase=Phase.COMPILE), 2000.0),
    *_sick("a lock in a start", Way(**START), 2000.0),  # type: ignore[arg-type]
    *_sick("a lock after the first steps", Way(learned=False)),
    *_sick("a lock before backward of others", LOCK, others=Way(stands=Phase.COLLECTIVE)),
    *_sick("an answer that never comes", Way(waits_in=ANSWER)),
    *_sick("a queue that stays empty", Way(waits_in=QUEUE)),
    *_sick("a future that nobody fulfils", Way(waits_in=FUTURE)),
    *_sick("a child that hangs", Way(waits_in=CHILD)),
    *_sick("a store that never answers", Way(waits_in=STORE)),
    *_sick("a sleep in an endless loop", Way(waits_in=SLEEP, wakes=1)),
    *_sick("a call in C that never ends", Way(call=CALL)),
    *_sick("a device that never answers", Way(device=True)),
    *_sick("an endless loop", Way(busy=1.0, state="R", places=LOOP)),
    *_sick("an endless loop in a loader", Way(busy=1.0, state="R", places=LOOP, phase=D), 1200.0),
    *_sick("an endless loop in an evaluation", Way(busy=1.0, state="R", places=LOOP, phase=E), 3000.0),
    *_sick("an endless loop that sleeps", Way(busy=0.01, wakes=20, places=LOOP)),
    *_sick("an endless loop that looks for a file", POLLS),
    *_sick("an endless loop that looks at a child, which loops", replace(POLLS, family=1.0), 4000.0),
    *_sick("a file system that never answers", Way(state="D"), 1500.0),
    *_sick("a file system that never answers, in a loader", Way(state="D", phase=D), 3500.0),
    Case("two of four hang", {1: LOCK, 2: LOCK}, (1200.0,), world=4),
    Case("one of four hangs and one evaluates", {1: LOCK}, (1200.0,), world=4),
    Case("two wait for each other", dict.fromkeys(range(2), WAITS), (600.0,)),
    Case("eight wait for each other", dict.fromkeys(range(8), WAITS), (600.0,), world=8),
    Case("all wait for each other in backward", dict.fromkeys(range(2), Way(stands=Phase.COLLECTIVE)), (600.0,)),
    Case("all wait for each other on two nodes", dict.fromkeys(range(2), WAITS), (600.0,), world=4, here=2, stuck=True),
    Case("two wait longer than their group may", dict.fromkeys(range(2), replace(WAITS, group_s=900.0)), (1200.0,)),
    *_sick("a lock, where the group may wait for three hours", LOCK, others=GRANTED),
    Case("one rank per node hangs", {0: LOCK}, (1200.0,), world=8, here=1, stuck=True),
    Case("one rank per node loops", {0: Way(busy=1.0, state="R", places=LOOP)}, (1200.0,), world=8, here=1, stuck=True),
    Case("one rank per node is stopped", {0: Way(state="T")}, (60.0,), world=8, here=1, stuck=True),
    Case("a job of one rank hangs", {0: LOCK}, (1200.0,), world=1),
    Case("a job of one rank hangs in its loader", {0: Way(phase=D, stands=D)}, (1200.0,), world=1),
    Case("all hang in their loaders", dict.fromkeys(range(4), Way(phase=D, stands=D)), (4000.0,), world=4),
    Case("the last one of an epoch hangs", {1: LOCK}, (4000.0,), gone=(0,)),
]  # fmt: skip
