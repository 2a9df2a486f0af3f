"""Print what ``quire doctor`` finds."""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quire.cli.diagnosis import Accelerator, Diagnosis
from quire.cli.options import facts_table, plain_table
from quire.memory.budget.ledger import Ledger
from quire.memory.machine import Machine, Pressure
from quire.units import format_bytes, format_count


def print_report(found: Diagnosis) -> None:
    """Print the machine, the ledger, all rules here and on GPUs, and what the system can do."""
    console = Console(highlight=False)
    console.print(_bounds(found.machine))
    facts = facts_table()
    for name, value in _facts_of(found):
        facts.add_row(name, escape(value))
    console.print(facts)
    console.print(ledger_table(found.name, found.ledger, _in_tokens(found, found.ledger)))
    index = found.device_index
    console.print(_rules(found, found.rules, "here" if index is None else f"on GPU {index}"))
    for each in found.accelerators:
        if each.rules and each.memory is not None and each.memory.index != index:
            console.print(_rules(found, each.rules, f"on GPU {each.memory.index}"))
    flags = list(_would_fit(found))
    if flags:
        console.print("[bold]A rule that refuses would accept[/]", *flags, "", sep="\n")
    console.print(_can(found))
    if found.ledger.refusal is not None:
        console.print(f"[bold red]refused[/]  {escape(found.ledger.refusal)}", soft_wrap=True)
        console.print(f"[bold]advice[/]   {escape(found.ledger.advice)}", soft_wrap=True)


def _bounds(machine: Machine) -> Table:
    title = "Memory limits of this machine, the tightest first"
    table = plain_table(title, "bound", "limit", "used", "available")
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


def _facts_of(found: Diagnosis) -> Iterator[tuple[str, str]]:
    machine = found.machine
    own, others = format_bytes(machine.process_bytes), format_bytes(machine.others_bytes)
    yield "in use", f"{others} by the system and other processes, {own} by this process"
    if machine.swap_total_bytes:
        free, total = format_bytes(machine.swap_free_bytes), format_bytes(machine.swap_total_bytes)
        yield "swap", f"{free} free of {total}; Quire does not count on it"
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
    pool = f"; {format_bytes(huge.pool_bytes)} reserved" if huge.pool_bytes else ""
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
    used = f"{others} by the driver and other processes, {own} by this process"
    why_not = "" if each.why_not is None else f"; cannot hold KV memory: {each.why_not}"
    return f"GPU {number}", f"{device.name}, {free} free of {total}, {used}{why_not}"


def _pressure(pressure: Pressure | None) -> str:
    if pressure is None:
        return "unknown: this kernel has no PSI"
    some, full = pressure.some_avg10, pressure.full_avg10
    return f"in the last 10 s, a task waited for memory {some:g} % of the time, all {full:g} %"


def ledger_table(name: str, ledger: Ledger, holds: str, besides: str = "") -> Table:
    """Make a table of a budget line by line; ``holds`` says what an accepted budget holds."""
    title = f"The budget of [cyan]{ledger.rule}[/] for {escape(name)}, line by line"
    table = plain_table(title, "", "bytes")
    table.add_column("from", style="dim")
    for term in ledger.terms:
        table.add_row(term.label, format_bytes(term.num_bytes), escape(term.source))
    table.add_section()
    size = format_bytes(ledger.kv_bytes)
    if ledger.refusal is None:
        why = f"bound by {escape(ledger.bound)}"
        table.add_row("[bold]KV memory[/]", f"[bold green]{size}[/]", why)
        start = "all at the start" if ledger.committed_whole else "as tokens come"
        table.add_row("", "", f"{holds}; committed {start}{besides}")
    else:
        table.add_row("[bold]KV memory[/]", f"[bold red]{size}[/]", "refused")
    fits = format_bytes(max(0, ledger.room_bytes))
    table.add_row("most that fits", fits, escape(ledger.room_source))
    return table


def _in_tokens(found: Diagnosis, ledger: Ledger) -> str:
    tokens, sequences = format_count(found.num_tokens(ledger)), found.num_sequences(ledger)
    longest = format_count(found.needs.context_tokens)
    return f"{tokens} tokens, or {sequences:,.1f} sequences of {longest}"


def _rules(found: Diagnosis, ledgers: tuple[Ledger, ...], where: str) -> Table:
    longest = f"× {format_count(found.needs.context_tokens)}"
    title = f"What each rule would give {where}  (--budget)"
    table = plain_table(title, "rule", "allows", "KV", "tokens", longest)
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
    table = plain_table("What this system can do", "")
    table.add_column("")
    for what, why_not in found.mechanisms:
        table.add_row(what, "[green]yes[/]" if why_not is None else f"[yellow]{escape(why_not)}[/]")
    table.show_header = False
    return table
