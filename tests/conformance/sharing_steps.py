"""What an engine does with the cache, step by step, and the answers that it must get."""

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.mapping_checks import counted_mappings
from conformance.sharing_checks import Checks
from conformance.sharing_model import GARBAGE, Held, Step
from conformance.sharing_world import World
from quire.kv import Extension, Fits, Never


class Engine:
    """It asks for room, writes what it computes, and tells the cache."""

    def __init__(self, world: World) -> None:
        self.world, self.checks = world, Checks(world)
        self.clock = 0

    def begin(self, seq_id: int, chunk: int, more: int) -> None:
        """The first step of a sequence, with what others have computed, or without."""
        world, held = self.world, self.world.held[seq_id]
        if not held.ids:
            world.say(held, more % 2)
        ids = np.array(held.ids, np.int32)
        before = world.snapshot() if more % 4 == 3 else None
        hit = world.accounting.match_prefix(seq_id, ids)
        assert before is None or world.snapshot() == before, "asking has changed something"
        self.checks.check_hit(held, hit)
        used = None if more % 8 == 7 else hit
        begin = used.num_tokens if used else 0
        external = min(max(0, more % 16 - 10), len(ids) - 1 - begin)
        step = Step(
            seq_id=seq_id,
            begin=begin + external,
            end=min(begin + external + 1 + chunk, len(ids)),
            hit=used,
            external=external,
            drafts=more % 3,
            promised=min(len(ids) + more, world.longest) * (more % 5 == 1),
            kept_bytes=300 * (more % 2),
        )
        if self.extend(step):
            held.written = held.computed = begin

    def extend(self, step: Step) -> bool:
        """Ask for room, and hold the answer against the sum."""
        world, held = self.world, self.world.held[step.seq_id]
        room = min(step.end + step.drafts, world.longest)
        asked = replace(step, end=room, kept_bytes=step.kept_bytes + world.promise(step))
        nothing = step.end <= room <= held.room and not step.hit and not step.external
        need = 0 if nothing else world.need([asked])
        short = step.end <= world.longest
        fits = nothing or (short and need <= world.free_bytes() - asked.kept_bytes)
        lacks_window = not nothing and short and world.lacks_window(step.seq_id)
        before = world.snapshot() if world.windows or not fits else None
        held_bytes = world.held_bytes()
        with self.checks.evictions(step.hit):
            verdict = world.accounting.try_extend(
                step.seq_id,
                step.end,
                Extension(
                    hit=step.hit,
                    external_tokens=step.external,
                    lookahead_tokens=step.drafts,
                    promised_tokens=step.promised,
                    kept_bytes=step.kept_bytes,
                ),
            )
        if not isinstance(verdict, Fits):
            if self.checks.is_about_windows(verdict):
                assert world.snapshot() == before, "a refusal has changed something"
                self.checks.check_window_refusal(asked, verdict)
                return False
            if fits and not (lacks_window and isinstance(verdict, Never)):
                self.checks.check_pages(asked, verdict)
                return False
            assert world.snapshot() == before, "a refusal has changed something"
            self.checks.check_refusal(asked, not short, verdict)
            return False
        assert fits, "there is no room"
        assert not lacks_window, "there is no window"
        world.note_window(step.seq_id)
        rise = world.held_bytes() - held_bytes
        assert rise >= need, "the plan's need is not the least"
        assert rise == need or not world.one_a_granule, "the plan's need is not what was taken"
        if not nothing:
            self.grown(step)
            held.lookahead = room - step.end
        return True

    def extend_each(self, steps: list[Step]) -> None:
        """Those that fit together grow; the next is refused, and others after it may fit."""
        world = self.world
        short = next((i for i, s in enumerate(steps) if s.end > world.longest), len(steps))
        free_bytes = world.free_bytes()
        if world.need(steps[:short]) <= free_bytes:  # then also the first of them
            needs, before = [0] * short, None
        else:
            needs = [world.need(steps[: count + 1]) for count in range(short)]
            before = world.snapshot() if needs[0] > free_bytes else None
        with self.checks.evictions(None):
            count = world.accounting.try_extend_each(
                [step.seq_id for step in steps], [step.end for step in steps]
            )
        assert count <= short
        assert not count or needs[count - 1] <= free_bytes
        few_mappings = world.config.max_mappings is not None
        assert few_mappings or count == short or needs[count] > free_bytes, "the next would fit"
        assert count or before is None or world.snapshot() == before, "it changed without growing"
        for step in steps[:count]:
            self.grown(step)
        for number, step in enumerate(steps[count:]):
            assert not self.extend(step) or number or few_mappings, "it was to be refused"

    def grown(self, step: Step) -> None:
        held = self.world.held[step.seq_id]
        held.base, held.room = step.begin, max(held.room, step.end)
        while len(held.ids) < held.room:
            # Sequences with the same text mostly go on with the same text.
            spice = step.seq_id * (self.clock % 5 == 0)
            self.world.say(held, (held.contents[-1] * 7 // 3 + spice) % 2 if held.contents else 0)

    def fork(self, seq_id: int, new_id: int) -> bool:
        """Begin a sequence as a copy of another one, if there is a window for it."""
        world = self.world
        before = world.snapshot()
        verdict = world.accounting.fork(seq_id, new_id)
        if isinstance(verdict, Fits):
            world.held[new_id] = world.held[seq_id].copy()
            world.note_window(new_id)
            return True
        assert self.checks.is_about_windows(verdict), f"sharing needs no room: {verdict}"
        assert world.snapshot() == before, "a refusal has changed something"
        room = world.held[seq_id].room
        self.checks.check_window_refusal(Step(seq_id=new_id, begin=room, end=room), verdict)
        return False

    def end_step(self, *, look: bool = True) -> None:
        """Carry out the changes, write the new tokens, tell the cache, and look at everything."""
        self.apply()
        for seq_id, held in self.world.held.items():
            for g in range(len(self.world.groups)):
                self.write_step(g, seq_id, held)
            held.written, held.lookahead = held.room, 0
        self.clock += 1
        self.mark()
        self.apply()
        self.checks.note_importance()
        if look:
            self.checks.check()

    def apply(self) -> None:
        with counted_mappings(self.world.accounting):
            self.world.store.apply(self.world.accounting.drain())

    def write_step(self, g: int, seq_id: int, held: Held) -> None:
        """What a step computes, or is brought from outside, and its drafts."""
        if held.written == held.room and not held.lookahead:
            return
        table = self.world.table(g, seq_id)
        if self.world.states[g]:
            self.write(
                g, table[: None if held.lookahead else 1], held.contents[held.room - 1 :][:1]
            )
            return
        first = int((table < 0).sum()) * self.world.size
        start, stop = max(held.written, first), held.room + held.lookahead
        slots = self.world.slots(g, seq_id, start, stop)
        self.write(g, slots, held.contents[start : held.room])

    def write(self, g: int, slots: Any, contents: list[int]) -> None:
        """Write into slots that no other sequence has, and garbage into those left over."""
        blocks = slots // self.world.pools.sizes[g].slots
        assert (self.world.pools[g].refs[blocks] == 1).all(), "written while shared"
        assert (self.world.pools[g].nodes[blocks] == -1).all(), "written while others may find it"
        contents = contents + [GARBAGE] * (len(slots) - len(contents))
        self.world.store.write(g, slots, np.array(contents, np.int64))

    def mark(self) -> None:
        """Tell the cache what is computed; of some sequences late, of some never."""
        told = [
            (seq_id, held)
            for seq_id, held in self.world.held.items()
            if (held.tells == 0 or (held.tells == 1 and self.clock % 3 == 0))
            and (held.written > held.computed or self.clock % 4 == 3)
        ]
        if told:
            self.checks.note_importance()
            seq_ids = [seq_id for seq_id, _ in told]
            counts = [held.written - held.computed for _, held in told]
            ids = [token for _, held in told for token in held.ids[held.computed : held.written]]
            packed = np.array(ids, np.int32)
            if self.clock % 2 and counts == [1] * len(told):
                self.world.accounting.mark_computed(seq_ids, None, packed)
            else:
                self.world.accounting.mark_computed(seq_ids, counts, packed)
        for _, held in told:
            held.computed = held.written
