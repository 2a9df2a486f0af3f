"""How ``quire doctor`` looks on a terminal."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quire.cli.diagnosis import Accelerator, Diagnosis
from quire.memory.budget.ledger import Ledger
from quire.memory.machine import Machine, Pressure
from quire.units import format_bytes, format_count


def print_report(found: Diagnosis) -> None:
    """The machine, the ledger, the other rules here and on GPUs, what the system can do."""
    console = Console(highlight=False)
    for table in (_bounds(found.machine), _facts(found), _ledger(found)):
        console.print(table)
    index = found.device_index
    console.print(_rules(found, found.rules, "here" if index is None else f"on GPU {index}"))
    for each in found.accelerators:
        if each.rules and each.memory is not None and each.memory.index != index:
            console.print(_rules(found, each.rules, f"on GPU {each.memory.index}"))
    flags = list(_would_fit(found))
    if flags:
        console.print("[bold]What was refused would fit with[/]", *flags, "", sep="\n")
    console.print(_can(found))
    if found.ledger.refusal is not None:
        console.print(f"[bold red]refused[/]  {escape(found.ledger.refusal)}", soft_wrap=True)
        console.print(f"[bold]advice[/]   {escape(found.ledger.advice)}", soft_wrap=True)


def _bounds(machine: Machine) -> Table:
    table = _titled("What limits memory here, the tightest first")
    table.add_column("bound")
    for column in ("limit", "used", "available"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for index, bound in enumerate(machine.bounds):
        sizes = (bound.limit_bytes, bound.used_bytes, bound.available_bytes)
        table.add_row(
            escape(bound.source),
            *map(format_bytes, sizes),
            "" if index else "[bold yellow]◀ binds[/]",
            style="" if index else "bold",
        )
    return table


def _facts(found: Diagnosis) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in _facts_of(found):
        table.add_row(name, escape(value))
    return table


def _facts_of(found: Diagnosis) -> Iterator[tuple[str, str]]:
    machine = found.machine
    own, others = format_bytes(machine.process_bytes), format_bytes(machine.others_bytes)
    yield "in use", f"{others} by others and the system, {own} by this process"
    if machine.swap_total_bytes:
        free, total = format_bytes(machine.swap_free_bytes), format_bytes(machine.swap_total_bytes)
        yield "swap", f"{free} free of {total}; Quire counts none of it"
    else:
        yield "swap", "none"
    yield "control groups", machine.cgroup
    for node in machine.nodes:
        free, total = format_bytes(node.available_bytes), format_bytes(node.total_bytes)
        forbidden = "" if node.allowed else "; not for this process (cpuset.mems)"
        yield f"NUMA node {node.node_id}", f"{free} available of {total}{forbidden}"
    yield "pressure", _pressure(machine.pressure)
    if machine.cgroup_pressure is not None:
        yield "… of the group", _pressure(machine.cgroup_pressure)
    most = "no limit" if machine.max_mappings is None else format_count(machine.max_mappings)
    yield "mappings", f"{format_count(machine.num_mappings)} of {most} (vm.max_map_count)"
    memlock = machine.memlock_bytes
    yield "locked memory", "no limit" if memlock is None else f"at most {format_bytes(memlock)}"
    huge = machine.huge_pages
    pool = f"; {format_bytes(huge.pool_bytes)} set aside" if huge.pool_bytes else ""
    yield (
        "huge pages",
        f"{huge.anonymous or 'unknown'}, shared: {huge.shared or 'unknown'}{pool}",
    )
    for number, each in enumerate(found.accelerators):
        yield _accelerator(number, each)


def _accelerator(number: int, each: Accelerator) -> tuple[str, str]:
    if each.memory is None:
        return f"GPU {number}", each.why_not or ""
    device = each.memory
    free, total, own, others = map(
        format_bytes, (device.free_bytes, device.total_bytes, device.own_bytes, device.others_bytes)
    )
    used = f"{others} by others and the driver, {own} by this process"
    why_not = "" if each.why_not is None else f"; not for KV memory: {each.why_not}"
    return f"GPU {number}", f"{device.name}, {free} free of {total}, {used}{why_not}"


def _pressure(pressure: Pressure | None) -> str:
    if pressure is None:
        return "the kernel does not say (no PSI)"
    some, full = pressure.some_avg10, pressure.full_avg10
    return f"of the last 10 s, some task waited for memory {some:g} %, all {full:g} %"


def ledger_table(name: str, ledger: Ledger, in_tokens: str) -> Table:
    """A budget line by line; ``in_tokens`` says what a budget that is granted holds."""
    table = _titled(f"The budget of [cyan]{ledger.rule}[/] for {escape(name)}, line by line")
    table.add_column("")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("from", style="dim")
    for term in ledger.terms:
        table.add_row(term.label, format_bytes(term.num_bytes), escape(term.source))
    table.add_section()
    size = format_bytes(ledger.kv_bytes)
    if ledger.refusal is None:
        why = f"bound by {escape(ledger.bound)}"
        table.add_row("[bold]KV memory[/]", f"[bold green]{size}[/]", why)
        table.add_row("", "", in_tokens)
    else:
        table.add_row("[bold]KV memory[/]", f"[bold red]{size}[/]", "refused")
    fits = format_bytes(max(0, ledger.room_bytes))
    table.add_row("most that fits", fits, escape(ledger.room_source))
    return table


def _ledger(found: Diagnosis) -> Table:
    return ledger_table(found.name, found.ledger, _in_tokens(found, found.ledger))


def _in_tokens(found: Diagnosis, ledger: Ledger) -> str:
    tokens, sequences = format_count(found.num_tokens(ledger)), found.num_sequences(ledger)
    longest = format_count(found.needs.context_tokens)
    whole = "committed whole at the start" if ledger.committed_whole else "committed as tokens come"
    return f"{tokens} tokens, or {sequences:,.1f} sequences of {longest}; {whole}"


def _rules(found: Diagnosis, ledgers: tuple[Ledger, ...], where: str) -> Table:
    table = _titled(f"What each rule would give {where}  (--budget)")
    table.add_column("rule")
    for column in ("allows", "KV", "tokens", f"× {format_count(found.needs.context_tokens)}"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound by", style="dim")
    for ledger in ledgers:
        chosen = ledger.rule == found.ledger.rule
        name = f"[cyan]{ledger.rule}[/]" if chosen else ledger.rule
        if ledger.refusal is None:
            sequences = f"{found.num_sequences(ledger):,.1f}"
            tokens = format_count(found.num_tokens(ledger))
            sizes = (ledger.kv_bytes + ledger.unused_bytes, ledger.kv_bytes)
            table.add_row(name, *map(format_bytes, sizes), tokens, sequences, escape(ledger.bound))
        else:
            wanted = f"[red]{format_bytes(ledger.kv_bytes)}[/]"
            table.add_row(name, wanted, "[red]refused[/]", "", "", "")
    return table


def _would_fit(found: Diagnosis) -> Iterator[str]:
    for ledger in found.rules:
        if ledger.refusal is not None and ledger.remedy is not None:
            yield f"  quire doctor --budget {ledger.rule} {ledger.remedy.flag}"


def _can(found: Diagnosis) -> Table:
    table = _titled("What this system can do")
    table.add_column("")
    table.add_column("")
    for what, why_not in found.mechanisms:
        table.add_row(what, "[green]yes[/]" if why_not is None else f"[yellow]{escape(why_not)}[/]")
    table.show_header = False
    return table


def _titled(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
