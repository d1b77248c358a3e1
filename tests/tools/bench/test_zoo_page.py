"""``docs/models.md`` and the table of the zoo: what they say, and that nothing is left out in silence."""

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models import SUITE
from treefx.errors import InputError
from treefx.tools.bench.job.models import make_config, read_configurations
from treefx.tools.bench.zoo.page import main, page
from treefx.tools.bench.zoo.record import ZooRecord
from treefx.tools.bench.zoo.run import ZooRow
from treefx.tools.bench.zoo.single import build_model

ROOT = Path(__file__).resolve().parents[3]
ROWS = [
    ZooRow("llama", "transformers", "packed", 0.0, 1e-6, 184, 111, 84, 2, 1.0, 1.0),
    ZooRow("nearly", "here", "partly", 0.0, 1e-6, 184, 111, 84, 2, 0.99, 0.96),
    ZooRow(
        "half", "here", "partly", 0.0, 1e-6, 184, 150, 84, 1, 0.5, 0.4, code="TFX104", line="a.py:3: x.cumsum(1)",
        expansions=[{"op": "aten.cumsum.default", "reason": "mixes | positions", "contracted": False}],
    ),
    ZooRow("near", "here", "rounds", 0.0, 2e-5, 184, 111, 84, 2, 1.0, 1.0, note="1.60 times", exactness=1e-13),
    ZooRow("gone", "here", "crashed", note="RuntimeError: broken"),
]  # fmt: skip


def _record(path: Path, inner: str, rows: list[ZooRow]) -> Path:
    record = ZooRecord(path, inner)
    for row in rows:
        record.add(row)
    return path


def test_the_page_counts_what_is_packed_and_names_the_rest(tmp_path: Path) -> None:
    records = _record(tmp_path / "a.json", "aot_eager", ROWS), _record(tmp_path / "b.json", "inductor", ROWS[:1])
    text = page(records)
    assert (
        "5 models: **2 run at least 95%" in text
        and "0 are wrong, 1 crash" in text
        and "With inductor: 1 models, 1" in text
        and "- Exact in float64, but further from it in float32 than 1.5 times eager: near." in text
    )
    packed, others = text.split("## Models with products on rows")
    assert "| llama | transformers | 111 of 184 | 100% | 1e-06 | packed, 1e-06 |" in packed and "| nearly |" in packed
    assert (
        "| 40% | [TFX104](troubleshooting.md#tfx104) | `a.py:3: x.cumsum(1)` | aten.cumsum.default: mixes / positions |"
        in others
    )
    assert "| near | exact in float64; rounds more than eager in float32 | 100% |  |  | 1.60 times |" in others
    assert "| gone | crashed | 0% |  |  | RuntimeError: broken |" in others and "- encoders: bert," in others
    main([tmp_path / "models.md", *records])
    assert (tmp_path / "models.md").read_text() == text
    with pytest.raises(InputError, match="the file to write"):
        main([tmp_path / "models.md"])


def test_every_causal_architecture_is_in_the_table_or_left_out_by_name() -> None:
    table = read_configurations()
    named = {name.partition(":")[0] for name in table["models"]} | {
        n for part in table["left_out"].values() for n in part
    }
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= named
    assert set(SUITE) <= set(table["models"])


def test_another_shape_of_an_architecture_has_its_own_sizes() -> None:
    if "nemotron_h" not in CONFIG_MAPPING:
        pytest.skip("transformers has no Nemotron-H")
    one, two = (make_config(name, vocab_size=32) for name in ("nemotron_h", "nemotron_h:groups"))
    assert (one.model_type, one.n_groups, two.model_type, two.n_groups) == ("nemotron_h", 1, "nemotron_h", 2)
    assert build_model("nemotron_h:groups", 16).config.n_groups == 2
    with pytest.raises(InputError, match="nemotron_h"):
        build_model("nemotron_h:nosuch", 16)


def test_the_page_is_that_of_the_records() -> None:
    line = next(one for one in (ROOT / "Makefile").read_text().splitlines() if "zoo.page docs/models.md" in one)
    records = [ROOT / word for word in line.split() if word.endswith(".json")]
    assert len(records) == 2
    assert (ROOT / "docs" / "models.md").read_text() == page(records)
