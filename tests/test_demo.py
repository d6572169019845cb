"""The demo: its input, its checks (shown to fail when a product is wrong), and the whole of it on the simulator."""

import importlib.util
import io
import json

import pytest
import torch
from typer.testing import CliRunner

import fourwave as fw
from fourwave.backends import registry
from fourwave.cli.app import app
from fourwave.demo import run as demo_run
from fourwave.demo import text
from fourwave.demo.linear import GemmLinear, LinearRecord
from fourwave.demo.model import EmbeddingModel, ModelUnavailable, model_dir

SIM_MISSING = registry.get("sim:gfx950").unavailable()
needs_sim = pytest.mark.skipif(SIM_MISSING is not None, reason=f"simulator: {SIM_MISSING}")
NO_GPU = registry.get("flydsl").unavailable()


def why_no_model():
    try:
        model_dir()
    except ModelUnavailable as why:
        return str(why)
    return None if importlib.util.find_spec("transformers") else "transformers is not installed"


needs_model = pytest.mark.skipif(why_no_model() is not None, reason=str(why_no_model()))
TWO = ("A cat sleeps on the sofa.", "The kitten naps on the couch.")


def test_default_sentences_when_nothing_is_named():
    assert text.read_sentences() == list(text.DEFAULT_SENTENCES)


def test_sentences_from_arguments_file_and_stdin_in_this_order(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("from file\n\n  second  \n", encoding="utf-8")
    stdin = io.StringIO("from stdin\n \n")
    assert text.read_sentences(["argument", "-"], path, stdin) == ["argument", "from file", "second", "from stdin"]


@pytest.mark.parametrize("content", ["", "\n  \n\t\n"])
def test_empty_input_is_an_error(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match="at least one sentence"):
        text.read_sentences(file=path)
    with pytest.raises(ValueError, match="at least one sentence"):
        text.read_sentences(["-"], stdin=io.StringIO(content))


def test_binary_input_is_an_error(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="not UTF-8"):
        text.read_sentences(file=path)


@pytest.fixture(scope="module")
def embedder():
    return EmbeddingModel.load()


@needs_model
def test_batching_keeps_the_order_of_the_sentences(embedder):
    sentences = ["A rather long sentence about the weather in the mountains.", "Short.", "Of middling length."]
    together = embedder.embed(embedder.batches(sentences, size=2))
    alone = torch.cat([embedder.embed(embedder.batches([sentence])) for sentence in sentences])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


@needs_model
def test_model_knows_what_is_similar(embedder):
    a, b, c = embedder.embed(embedder.batches([*TWO, "Interest rates rose again."]))
    assert a @ b > 0.5 > 0.2 > a @ c


@needs_model
def test_native_run_covers_every_linear():
    started: list[int] = []
    seen: list[LinearRecord] = []
    result = demo_run.run(TWO, "native", on_start=started.append, on_call=seen.append)
    assert result.num_linears == 37 and started == [37] and len(seen) == 37  # 6 layers of 6, and the pooler
    assert {record.name for record in seen} == {record.name for record in result.records}
    assert len({record.name for record in seen}) == 37
    assert result.failures() == []
    assert 0 < max(record.max_ratio for record in result.records) <= 1
    assert result.cosine.min() >= demo_run.MIN_COSINE


def gemm_linear(records: list[LinearRecord]) -> GemmLinear:
    torch.manual_seed(0)
    return GemmLinear("x", torch.nn.Linear(96, 40), "native", records.append)


@pytest.mark.parametrize("wrong", ["value", "bias", "last k", "nan"])
def test_a_wrong_product_exceeds_its_bound(monkeypatch, wrong):
    """One element off by a few float32 roundings, a bias left out, the last k skipped, a NaN: each is over the bound."""
    gemm = fw.gemm

    def broken(a, b, *, bias, **options):
        if wrong == "bias":
            return gemm(a, b, **options)
        if wrong == "last k":
            return gemm(a[:, :-1], b[:, :-1], bias=bias, **options)
        out = gemm(a, b, bias=bias, **options)
        out[3, 5] = float("nan") if wrong == "nan" else out[3, 5] + 1e-3
        return out

    records: list[LinearRecord] = []
    linear = gemm_linear(records)
    linear(torch.randn(7, 96))
    assert records[0].max_ratio <= 1
    monkeypatch.setattr(fw, "gemm", broken)
    linear(torch.randn(7, 96))
    assert not records[1].max_ratio <= 1


def test_linear_keeps_leading_dimensions_and_reads_views():
    records: list[LinearRecord] = []
    linear = gemm_linear(records)
    x = torch.randn(2, 9, 100)[:, ::2, :96]
    out = linear(x)
    assert out.shape == (2, 5, 40) and out.dtype == torch.float32
    assert (records[0].M, records[0].N, records[0].K) == (10, 40, 96) and records[0].max_ratio <= 1


@needs_model
def test_command_fails_when_a_product_is_wrong(monkeypatch):
    gemm = fw.gemm
    monkeypatch.setattr(fw, "gemm", lambda a, b, **options: gemm(a, b, **options) * 1.001)
    result = CliRunner().invoke(app, ["demo", "--backend", "native", *TWO])
    assert result.exit_code == 1
    assert "exceed their error bound" in result.output


@needs_model
def test_command_fails_when_the_embedding_drifts(monkeypatch):
    monkeypatch.setattr(demo_run, "MIN_COSINE", 1.0 + 1e-9)
    result = CliRunner().invoke(app, ["demo", "--backend", "native", *TWO])
    assert result.exit_code == 1 and "cosine to full precision" in result.output


@needs_model
def test_command_takes_stdin_and_says_what_was_truncated(tmp_path):
    record = tmp_path / "demo.json"
    lines = "A short one.\n" + "word " * 300 + "\n"
    result = CliRunner().invoke(app, ["demo", "-", "--backend", "native", "--json", str(record)], input=lines)
    assert result.exit_code == 0, result.output
    assert "sentence 2 has 302 tokens; the model takes 256" in result.output
    assert json.loads(record.read_text())["truncated_tokens"] == {"2": 302}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--file", "no-such-file"], "cannot read no-such-file"),
        (["-"], "at least one sentence"),
        (["--backend", "nonsense"], "nonsense"),
        pytest.param(
            ["--backend", "flydsl"], str(NO_GPU).split("; ")[0], marks=pytest.mark.skipif(NO_GPU is None, reason="GPU")
        ),
    ],
)
def test_command_refuses_what_it_cannot_do(arguments, said):
    result = CliRunner().invoke(app, ["demo", *arguments], input="")
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@needs_model
@needs_sim
@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_demo_on_the_simulator(tmp_path, arch):
    path = tmp_path / "demo.json"
    result = CliRunner().invoke(app, ["demo", "--backend", f"sim:{arch}", "--json", str(path)])
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert record["findings"] == [] and record["workgroups"] > 37
    assert min(record["cosine_to_float32"]) >= 0.999
    assert len(record["linears"]) == 37 and max(linear["max_ratio"] for linear in record["linears"]) <= 1
    similarity = torch.tensor(record["similarity"])
    for first in range(0, 6, 2):  # the defaults: three pairs that say the same, two sentences on their own
        others = torch.cat([similarity[first, :first], similarity[first, first + 2 :]])
        assert similarity[first, first + 1] > others.max() + 0.1


def test_auto_takes_a_gpu_where_there_is_one_and_the_simulator_elsewhere(monkeypatch):
    assert demo_run.choose_backend("auto")[0] == ("flydsl" if NO_GPU is None else "sim:gfx950")
    monkeypatch.setattr(type(registry.get("flydsl")), "unavailable", lambda self, arch=None: None)
    assert demo_run.choose_backend("auto")[0] == "flydsl"


def test_the_variable_chooses_where_the_option_does_not(monkeypatch):
    from fourwave.demo.run import choose_backend

    monkeypatch.setenv("FOURWAVE_BACKEND", "fp32=sim:gfx942,bf16=native")
    assert choose_backend("auto") == ("native", "FOURWAVE_BACKEND=fp32=sim:gfx942,bf16=native")
    monkeypatch.setenv("FOURWAVE_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        choose_backend("auto")
