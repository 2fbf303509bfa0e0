"""Choice of launch parameters: measured once, remembered, and never in the way."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="Triton is published for Linux only")
import triton
from triton.runtime.errors import OutOfResources

from kvcal.kernels import tuning
from kvcal.kernels.tuning import DECODE, PREFILL, WORTH_TUNING, Key, Tuning

KEY = Key("card", '{"ROWS": 16}', prefill=False)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The file of choices, of which nothing exists yet, not even its folder."""
    monkeypatch.setenv("KVCAL_CACHE", str(tmp_path / "new" / "cache"))
    assert tuning.path().is_relative_to(tmp_path)
    return tuning.path()


class Clock:
    """``do_bench`` that runs once and tells how long the last candidate took; 9 where nothing is said."""

    def __init__(self, times=()):
        self.times = dict(times)
        self.ran = []

    def run(self, how):
        self.ran.append(how)
        if self.times.get(how) is None and how in self.times:
            raise OutOfResources(2, 1, "shared memory")

    def bench(self, call, **_):
        call()
        return self.times.get(self.ran[-1], 9.0)


@pytest.fixture
def clock(monkeypatch):
    def start(times=()):
        clock = Clock(times)
        for name in ("do_bench", "do_bench_cudagraph"):
            monkeypatch.setattr(triton.testing, name, clock.bench)
        return clock

    return start


def fail(*_, **__):
    raise AssertionError("measured")


class TestUnmeasured:
    @pytest.mark.parametrize(("prefill", "first"), [(False, DECODE[0]), (True, PREFILL[0])])
    @pytest.mark.parametrize(("card", "size"), [("interpreter", 1e12), ("card", WORTH_TUNING - 1)])
    def test_is_the_first(self, card, size, prefill, first, cache):
        assert tuning.choose(Key(card, "{}", prefill), size, fail) == first
        assert not cache.exists()

    def test_a_tensor_on_the_cpu_is_interpreted(self):
        q = torch.zeros(1, 1, 1, 64)
        few, many = (Key.of(q, {"ROWS": rows, "PAGE": 16}) for rows in (16, 64))
        assert (few.card, few.prefill, many.prefill) == ("interpreter", False, True)
        assert json.loads(few.constants) == {"ROWS": 16, "PAGE": 16}
        assert few == Key.of(q, {"PAGE": 16, "ROWS": 16})

    def test_one_processor_interprets(self):
        assert tuning.processors(torch.device("cpu")) == 1


class TestMeasured:
    @pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
    def test_is_the_fastest(self, prefill, clock):
        candidates = PREFILL if prefill else DECODE
        for fastest in candidates:
            key = Key("card", f"{fastest}", prefill)
            measured = clock({fastest: 1.0})
            assert tuning.choose(key, WORTH_TUNING, measured.run) == fastest
            assert set(measured.ran) == set(candidates)

    def test_is_measured_once(self, clock, cache):
        chosen = tuning.choose(KEY, WORTH_TUNING, clock({DECODE[3]: 1.0}).run)
        assert len(json.loads(cache.read_text())) == 1
        assert list(cache.parent.iterdir()) == [cache]
        clock()
        assert tuning.choose(KEY, WORTH_TUNING, fail) == chosen == DECODE[3]

    @pytest.mark.parametrize("other", [Key("other", KEY.constants, False), Key("card", "{}", False)])
    def test_another_key_is_measured_too(self, other, clock, cache):
        tuning.choose(KEY, WORTH_TUNING, clock({DECODE[3]: 1.0}).run)
        assert tuning.choose(other, WORTH_TUNING, clock({DECODE[2]: 1.0}).run) == DECODE[2]
        assert tuning.choose(KEY, WORTH_TUNING, fail) == DECODE[3]
        assert len(json.loads(cache.read_text())) == 2

    def test_another_triton_is_measured_too(self, clock, monkeypatch):
        tuning.choose(KEY, WORTH_TUNING, clock({DECODE[3]: 1.0}).run)
        monkeypatch.setattr(triton, "__version__", "0.0")
        assert tuning.choose(KEY, WORTH_TUNING, clock({DECODE[2]: 1.0}).run) == DECODE[2]

    def test_what_does_not_fit_is_passed_over(self, clock):
        measured = clock({DECODE[0]: None, DECODE[1]: None, DECODE[2]: 8.0})
        assert tuning.choose(KEY, WORTH_TUNING, measured.run) == DECODE[2]

    def test_other_errors_are_not(self, clock):
        clock()
        with pytest.raises(AssertionError, match="measured"):
            tuning.choose(KEY, WORTH_TUNING, fail)


class TestFile:
    @pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\x00", '"text"'])
    def test_a_broken_one_is_ignored_and_replaced(self, text, clock, cache):
        cache.parent.mkdir(parents=True)
        cache.write_text(text)
        assert tuning.choose(KEY, WORTH_TUNING, clock({DECODE[1]: 1.0}).run) == DECODE[1]
        assert tuning.choose(KEY, WORTH_TUNING, fail) == DECODE[1]

    def test_bytes_that_are_no_text_are_ignored(self, clock, cache):
        cache.parent.mkdir(parents=True)
        cache.write_bytes(b"\xff\xfe{}")
        assert tuning.choose(KEY, WORTH_TUNING, clock({DECODE[1]: 1.0}).run) == DECODE[1]

    @pytest.mark.parametrize("entry", [{"keys": 32}, {"keys": 32, "blocks": 3}, [32, 1], None], ids=str)
    def test_an_entry_of_another_version_is_measured_again(self, entry, clock, cache):
        tuning.choose(KEY, WORTH_TUNING, clock().run)
        (name,) = json.loads(cache.read_text())
        cache.write_text(json.dumps({name: entry, "other": {"kept": 1}}))
        assert tuning.choose(KEY, WORTH_TUNING, clock({DECODE[1]: 1.0}).run) == DECODE[1]
        assert json.loads(cache.read_text())["other"] == {"kept": 1}

    def test_a_folder_that_cannot_be_written_stops_nobody(self, clock, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("KVCAL_CACHE", str(tmp_path / "file" / "below"))
        assert tuning.choose(KEY, WORTH_TUNING, clock({DECODE[1]: 1.0}).run) == DECODE[1]

    def test_lies_in_the_home_unless_moved(self, tmp_path, monkeypatch):
        monkeypatch.delenv("KVCAL_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert tuning.path() == tmp_path / ".cache" / "kvcal" / "attention-tuning.json"


class TestCandidates:
    @pytest.mark.parametrize("how", [*DECODE, *PREFILL], ids=str)
    def test_are_what_triton_compiles(self, how):
        for number in (how.keys, how.warps):
            assert number & (number - 1) == 0
        assert how.keys >= 16
        assert how == Tuning(**vars(how))

    def test_differ(self):
        for candidates in (DECODE, PREFILL):
            assert len(set(candidates)) == len(candidates)
