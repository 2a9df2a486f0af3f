"""Weights in huge pages: the same bits, no page of a file left, and nothing where it cannot be."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

from quire.errors import MemoryUnavailable
from quire.memory.host import huge_pages as huge
from quire.memory.host.huge_pages import huge_page_bytes
from quire.memory.machine.probe import mapped_from_files
from quire.models import loader as weights
from quire.models.footprint import footprint
from quire.models.loader import hold_in_memory, load
from tiny import random_model

MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with some huge pages of weights, its embeddings tied."""
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    made = tmp_path_factory.mktemp("weights")
    random_model(config).save_pretrained(made)
    return made


@pytest.fixture(autouse=True)
def _has_huge_pages(request: pytest.FixtureRequest) -> None:
    if not huge_page_bytes() and "without" not in request.node.name:
        pytest.skip("this machine has no transparent huge pages")


def on_files(model: PreTrainedModel) -> int:
    """Bytes of weights that lie in mappings of files."""
    by_place = {p.data_ptr(): p.nbytes for p in model.parameters()}
    return sum(by_place[place] for place in mapped_from_files(by_place))


def num_bytes(model: PreTrainedModel) -> int:
    """Of all weights, tied ones once."""
    return sum(p.nbytes for p in model.parameters())


def copies(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def mappings() -> Iterator[tuple[range, str, str]]:
    """Of this process: addresses, the file if it is one, and what the system says of it."""
    for said in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        head, _, more = said.partition("\n")
        edges, *_, last = head.split(maxsplit=5)
        start, _, stop = edges.partition("-")
        yield range(int(start, 16), int(stop, 16)), last, more


def resident(path: Path) -> int:
    """Bytes of the files of a folder that this process has mapped and in memory."""
    sizes = (re.search(r"^Rss: +(\d+) kB", more, re.MULTILINE) for _, file, more in mappings()
             if file.startswith(f"{path}/"))  # fmt: skip
    return sum(int(size[1]) * 1024 for size in sizes if size)


def asks_for_huge_pages(address: int) -> bool:
    """Whether the system was told so. How many it has is another matter."""
    (found,) = (more for addresses, _, more in mappings() if address in addresses)
    return " hg" in found.partition("VmFlags:")[2]


def test_the_same_bits_in_other_pages(folder: Path) -> None:
    mapped = load(folder, copy_weights=False).model
    total = num_bytes(mapped)
    assert on_files(mapped) == total > 8 * MIB
    before = copies(mapped)
    for tensor in before.values():
        tensor.sum()
    assert resident(folder) > total // 2
    assert hold_in_memory(mapped) == total
    assert on_files(mapped) == 0
    assert footprint(mapped).weights_bytes == footprint(mapped).counted_bytes >= total
    assert resident(folder) == 0
    first = min(each.data_ptr() for each in mapped.parameters())
    assert first % huge_page_bytes() == 0
    assert asks_for_huge_pages(first)
    after = mapped.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert mapped.lm_head.weight is mapped.model.embed_tokens.weight


def test_copied_weights_say_the_same(folder: Path) -> None:
    copied, mapped = load(folder).model, load(folder, copy_weights=False).model
    assert on_files(copied) == 0 < on_files(mapped)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        assert torch.equal(copied(ids).logits, mapped(ids).logits)


def test_a_copy_can_be_written_to_and_saved(folder: Path, tmp_path: Path) -> None:
    model = load(folder).model
    with torch.no_grad():
        model.model.norm.weight.fill_(3)
    model.save_pretrained(tmp_path)
    assert bool((load(tmp_path).model.model.norm.weight == 3).all())
    assert not bool((load(folder).model.model.norm.weight == 3).all())


def test_a_forked_child_sees_the_weights(folder: Path) -> None:
    model = load(folder).model
    bits = model.model.norm.weight.detach().numpy()
    want = bits.copy()
    child = os.fork()
    if not child:
        os._exit(0 if (bits == want).all() and want.any() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_nothing_is_copied_a_second_time(folder: Path) -> None:
    model = load(folder).model
    places = [p.data_ptr() for p in model.parameters()]
    assert hold_in_memory(model) == 0
    assert [p.data_ptr() for p in model.parameters()] == places


def test_without_room_weights_stay_where_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = num_bytes(load(folder, copy_weights=False).model)
    monkeypatch.setattr(weights, "available_bytes", lambda: total)
    assert on_files(load(folder).model) == total

    def silent() -> int:
        raise MemoryUnavailable("the system does not say")

    monkeypatch.setattr(weights, "available_bytes", silent)
    assert on_files(load(folder).model) == total


def test_without_huge_pages_weights_stay_where_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge, "huge_page_bytes", lambda: 0)
    model = load(folder).model
    assert on_files(model) == num_bytes(model)


def test_weights_that_share_a_part_stay_where_they_are(folder: Path) -> None:
    model = load(folder, copy_weights=False).model
    table = model.model.embed_tokens.weight
    model.model.norm.weight = torch.nn.Parameter(table.data[3], requires_grad=False)
    assert hold_in_memory(model) == 0
