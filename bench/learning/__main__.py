"""The same task, model, optimizer, rates and loss, learned three ways over several seeds.

    python -m bench learning                   the tiny model: minutes
    python -m bench.learning smollm2           the default model: half an hour
    python -m bench.learning tiny --out /tmp/x --seeds 3 4 --ways in_step trl

Writes bench/results/learning*.json and .png after every run, and goes on where it was cut off.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.learning import ours
from bench.learning.curve import Curve, report
from bench.learning.picture import draw
from bench.learning.setting import SETTINGS, TRL, WAYS, Setting, Way
from bench.learning.tiny_model import write_tiny_model
from deltawire.job.load import load_job
from deltawire.job.resolve import resolve

RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    """Run what is missing, one run after another."""
    options = _options()
    setting = SETTINGS[options.setting]
    ways = [way for way in WAYS if way.name in options.ways]
    out = options.out / f"{setting.results}.json"
    curves = _read(out) if options.resume else []
    with tempfile.TemporaryDirectory(prefix="learning-") as scratch:
        model = setting.model or str(write_tiny_model(Path(scratch) / "model"))
        done = {(curve.way, curve.seed) for curve in curves}
        for seed, way in _runs(ways, options.seeds):
            if (way.name, seed) in done:
                continue
            folder = Path(scratch) / f"{way.name}-{seed}"
            folder.mkdir()
            curves.append(_run(setting, way, seed, [*options.set, f"model.source={model}"], folder))
            print(f"{way.name} seed {seed}: {curves[-1].start:.3f} -> {curves[-1].end:.3f}")
            _write(curves, setting, out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("setting", nargs="?", default="tiny", choices=sorted(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=[way.name for way in WAYS])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every way")
    parser.add_argument("--resume", action="store_true", help="keep the runs of the result file")
    return parser.parse_args()


def _runs(ways: list[Way], seeds: list[int]) -> Iterator[tuple[int, Way]]:
    """Seed by seed, so that a cut leaves whole comparisons."""
    for seed in seeds:
        for way in ways:
            yield seed, way


def _run(setting: Setting, way: Way, seed: int, overrides: list[str], scratch: Path) -> Curve:
    told = [*overrides, f"train.seed={seed}", *way.overrides]
    resolved = resolve(load_job(setting.job), told)
    if way is TRL:
        from bench.learning import theirs

        return theirs.learn(resolved, way=way.name, scratch=scratch)
    return ours.learn(resolved, way=way.name, scratch=scratch)


def _read(path: Path) -> list[Curve]:
    if not path.exists():
        return []
    return [Curve(**row) for row in json.loads(path.read_text())["curves"]]


def _write(curves: list[Curve], setting: Setting, out: Path) -> None:
    out.write_text(json.dumps(report(curves), indent=1) + "\n")
    titles = {way.name: way.title for way in WAYS}
    draw(curves, titles, setting.title, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
