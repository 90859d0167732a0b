"""The device script, run whole at tiny sizes with interpreted kernels, and broken on purpose."""

from __future__ import annotations

import collections
import functools
import importlib
import math
import time

import bare_script
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.kernels_pallas import attention_gpu, gate_scan_gpu, kv_write_gpu, work
from jaxstate.models import params
from jaxstate.state import StepShape

bare_script.make_importable()
device_attention, device_jobs, device_kernels, device_problem, device_report, device_run = (
    importlib.import_module(f"device_{name}")
    for name in ("attention", "jobs", "kernels", "problem", "report", "run")
)
device_scans, device_sizes, device_timing = (
    importlib.import_module(f"device_{name}") for name in ("scans", "sizes", "timing")
)

BARS = ["h200.decode", "h200.group", "h200.gate", "h200.step"]
FULL, TINY = device_sizes.FULL, device_sizes.TINY


# The whole script


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Process and lines of one run of everything."""
    out = tmp_path_factory.mktemp("device") / "lines.jsonl"
    done = bare_script.run("--tiny", "--part", "kernels", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert out.read_text() == done.stdout
    return done, bare_script.lines(done.stdout)


@pytest.mark.long
def test_whole_run_imports_nothing_beyond_jax_numpy_flax_and_the_checkout(whole):
    done, _ = whole
    assert "jaxstate-links-" in done.stderr.split("imported ")[-1]
    assert {"chex", "gguf", "grpc", "jinja2", "platformdirs", "safetensors"} < bare_script.hidden()


@pytest.mark.long
def test_every_bar_has_exactly_one_line_and_is_not_decided_on_a_cpu(whole):
    _, lines = whole
    bars = [line for line in lines if "bar" in line]
    assert [bar["bar"] for bar in bars] == BARS
    for bar in bars:
        assert bar["measured"] > 0 and bar["n"] > 0
        assert bar["holds"] is None and "H200" in bar["reason"]


@pytest.mark.long
def test_every_line_names_device_version_and_commit(whole):
    _, lines = whole
    for line in lines:
        assert line["device"] == "CpuDevice(id=0)" and line["jax"] == jax.__version__
        assert line["commit"] and line["bench"] == "device"


@pytest.mark.long
def test_every_kernel_is_checked_and_all_hold(whole):
    _, lines = whole
    checks = [line for line in lines if "check" in line]
    assert all(check["holds"] for check in checks), [c for c in checks if not c["holds"]]
    kinds = collections.Counter(check["check"].split()[0] for check in checks)
    assert kinds == {
        "attention": 7, "kv_write": 2, "gate_scan_hidden": 2, "gate_scan": 2, "step": 2
    }  # fmt: skip


@pytest.mark.long
def test_nothing_is_left_out_and_every_timing_stands_beside_its_floor(whole):
    _, lines = whole
    assert not [line for line in lines if "measure" in line]
    [device] = [line for line in lines if line.get("arm") == "device"]
    timings = {line["timing"]: line for line in lines if "timing" in line}
    for timing in timings.values():
        ratio = timing["measured"] / timing["floor"]  # each number has five digits
        assert timing["ratio"] == pytest.approx(ratio, rel=1e-3)
        assert min(timing["samples_ms"]) <= timing["measured"] <= max(timing["samples_ms"])
    decode = timings["decode kernel 2x128"]
    read = 2 * 128 * 2 * 2 * 16 * 2  # rows, cells, keys and values, heads, head_dim, bytes
    compute = 4 * 2 * 128 * 4 * 16  # two products of rows, cells, query heads, head_dim
    assert decode["floor"] == pytest.approx(
        1e3 * max(read / device["copy_bytes_per_s"], compute / device["flops_per_s"]), rel=1e-3
    )
    beside = {"decode xla 2x128", "decode dot_product 2x128", "gate hidden xla 2x520"}
    assert beside | {"step query xla 32 behind 128", "kv_write kernel 2"} < timings.keys()


def test_a_job_that_hangs_ends_at_the_deadline_with_a_line_for_all_that_is_left():
    began = time.perf_counter()
    hang = (
        "import device_sources; device_sources.make_importable()\n"
        "import time, device_jobs\n"
        "device_jobs._floors = lambda run: time.sleep(600)\n"
    )
    done = bare_script.run("--tiny", "--deadline-s", "6", before=hang, timeout_s=120)
    assert done.returncode == 1, done.stderr
    assert time.perf_counter() - began < 60
    lines = bare_script.lines(done.stdout)
    left = [line["measure"] for line in lines if "measure" in line]
    assert left == [job.name for job in device_jobs.jobs(TINY, "kernels")]
    assert all(line["measured"] is None for line in lines if "measure" in line)
    assert [line["bar"] for line in lines if "bar" in line] == BARS


# In this process


def _main(capsys, *arguments: str) -> tuple[int, list[dict]]:
    code = device_jobs.main(time.perf_counter(), arguments)
    return code, bare_script.lines(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")


def test_without_an_accelerator_every_bar_says_so(capsys):
    code, lines = _main(capsys)
    assert code == 0
    assert [line["bar"] for line in lines] == BARS
    assert all(line["measured"] is None for line in lines)
    assert {line["reason"] for line in lines} == {"no accelerator"}


def test_a_broken_kernel_is_caught_and_the_run_goes_on(capsys, monkeypatch):
    right = kv_write_gpu.kv_write

    def one_cell_off(k_pages, v_pages, k, v, cells, **options):
        return right(k_pages, v_pages, k, v, jnp.where(cells == 7, 8, cells + 1), **options)

    monkeypatch.setattr(kv_write_gpu, "kv_write", one_cell_off)
    code, lines = _main(capsys, "--tiny", "--only", "check kv_write")
    assert code == 1
    assert [line["holds"] for line in lines if "check" in line] == [False, False]
    assert [line["bar"] for line in lines if "bar" in line] == BARS
    assert {line["reason"] for line in lines if "measure" in line} == {"left out by --only"}


def _report(capsys) -> tuple:
    report = device_report.Report(command="test", commit="test", path=None, part="kernels")
    run = device_run.Run(report=report, kernels=device_run.INTERPRETED, sizes=TINY)
    return run, lambda: bare_script.lines(capsys.readouterr().out)


def _blind_to_shifts(right, q, k, v, *others, **options):
    *others, shifts = others
    still = [jax.tree.map(jnp.zeros_like, one).replace(cos=one.cos * 0 + 1) for one in shifts]
    return right(q, k, v, *others, still, **options)


def _slightly_off(right, *args, **options):
    return right(*args, **options) * 1.001


def _reading_all_cells(right, *args, selection=None, **options):
    return right(*args, selection=None, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    "case, broken",
    [
        ("decode", _blind_to_shifts), ("group", _slightly_off),
        ("half of the blocks", _reading_all_cells),
    ],
)  # fmt: skip
def test_a_broken_attention_does_not_hold(capsys, monkeypatch, case, broken):
    run, lines = _report(capsys)
    heads = TINY.small[0]
    [chosen] = [
        c for c in device_kernels.cases(heads, "float32", TINY, real=False) if c.name == case
    ]
    right = attention_gpu.attention
    monkeypatch.setattr(attention_gpu, "attention", functools.partial(broken, right))
    device_run.run_checks(run, [device_kernels.attention_check(run, chosen, False)])
    [line] = lines()
    assert line["holds"] is False and run.report.failed == [line["check"]]


def test_a_gate_scan_that_takes_any_of_equal_logits_does_not_hold(capsys, monkeypatch):
    run, lines = _report(capsys)
    right = gate_scan_gpu.gate_scan

    def last_of_equals(logits, bits, sets, **options):
        found = right(logits[:, ::-1], bits, sets, **options)
        return found.replace(top_ids=logits.shape[1] - 1 - found.top_ids)

    monkeypatch.setattr(gate_scan_gpu, "gate_scan", last_of_equals)
    check = device_scans.scan_check(run, 3, 333, 64, "float32", source="gate_scan", ties=True)
    device_run.run_checks(run, [check])
    [line] = lines()
    assert line["holds"] is False and line["measured"] > 0


def test_what_is_no_number_holds_nothing_and_stays_valid_json(capsys):
    run, lines = _report(capsys)
    run.report.check("nan", float("nan"), device_kernels.TOLERANCE["float32"], unit="x")
    [line] = lines()
    assert line["measured"] == "nan" and line["holds"] is False


def test_what_does_not_fit_cannot_run_or_raises_has_a_line_with_the_reason(capsys):
    run, lines = _report(capsys)

    def refuse(_):
        raise NotImplementedError("not on this device")

    def fill(_):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def fail(_):
        raise ValueError("broken")

    ran = []
    jobs = [
        device_run.Job(name=name, work=work, seconds=seconds)
        for name, work, seconds in (
            ("late", ran.append, 1e6), ("refused", refuse, 0), ("large", fill, 0),
            ("broken", fail, 0), ("fine", ran.append, 0),
        )
    ]  # fmt: skip
    code = device_run.run_jobs(
        run, jobs, lambda: run.report.finish({}, "none"), began=time.perf_counter(),
        deadline_s=100, only=(),
    )  # fmt: skip
    assert code == 1 and ran == [run]
    reasons = {line["measure"]: line["reason"] for line in lines() if "measure" in line}
    assert reasons.keys() == {"late", "refused", "large", "broken"}
    assert "1000000 s left" in reasons["late"] and reasons["refused"] == "not on this device"
    assert "out of device memory" in reasons["large"] and reasons["broken"] == "ValueError: broken"
    assert run.report.failed == ["broken"]


# Sizes that only a device can run


def _cells_read(rows) -> int:
    return sum(int((one.items[:, work.FILL] - one.items[:, work.FIRST]).sum()) for one in rows.work)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checks_at_real_sizes_can_be_laid_out(dtype):
    for case in device_kernels.cases(FULL.real, dtype, FULL, real=True):
        stretches = device_problem.all_stretches(case.groups)
        cells = np.zeros(case.layout.num_pages * case.layout.page_size, int)
        for one in stretches:
            cells[one.begin : one.end] += 1
        assert cells.max() == 1, "contexts lie apart"
        for name in ("pallas_gpu", "xla"):
            read = _cells_read(case.layout.pack(case.groups, name))
            assert read == sum(one.end - one.begin for one in stretches)


def test_the_grid_of_timings_can_be_laid_out():
    for rows in FULL.rows:
        for context in FULL.contexts:
            groups = device_problem.apart(rows, context)
            shape = StepShape(num_tokens=rows, block_tokens=1, num_rows=1)
            layout = device_attention.layout_of(FULL.real, groups, shape, rows * context)
            assert layout.num_pages * layout.page_size == rows * context
            small = rows * context <= device_attention.MOST_XLA_CELLS
            for name in ("pallas_gpu", "xla") if small else ("pallas_gpu",):
                assert _cells_read(layout.pack(groups, name)) == rows * context


def test_the_model_is_llama_8b_and_offsets_of_the_huge_pool_pass_32_bits():
    assert params.num_params(FULL.model) == 8_030_261_248
    assert FULL.huge_pages * 64 * FULL.real.num_kv_heads * FULL.real.head_dim >= 2**31
    names = [job.name for job in device_jobs.jobs(FULL, "kernels")]
    assert len(names) == len(set(names))


def test_noise_has_the_wanted_spread_and_repeats_nothing():
    draw = functools.partial(device_timing.noise, shape=(64, 8, 128), dtype="float32")
    one, other = (np.asarray(draw(np.uint32(seed), np.float32(0.5))) for seed in (1, 2))
    assert abs(one.mean()) < 0.01 and one.std() == pytest.approx(0.5, rel=0.01)
    assert np.abs(one).max() <= 0.5 * math.sqrt(3)
    for axis in range(3):
        neighbours = np.roll(one, 1, axis)
        assert abs(np.corrcoef(neighbours.ravel(), one.ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(other.ravel(), one.ravel())[0, 1]) < 0.02
