"""Several real processes write what one process with as many devices writes."""

import pytest

from tests.distributed.generating import texts
from tests.distributed.processes import Ended, free_port, run_all
from tests.unit.hf.models import model_folder, write

from tests.unit.hf import images  # isort: skip

pytestmark = pytest.mark.slow
DEVICES = 4


# With a device each, processes divide weights too.
@pytest.mark.parametrize(("count", "cases"), [(2, (0, 2)), (4, (1,))])
def test_tokens_and_scores_are_those_of_one_process(count, cases, tmp_path):
    at = f"127.0.0.1:{free_port()}"
    rest = [str(x) for x in (count, DEVICES // count, tmp_path, *cases)]
    ended = run_all("generating", [[at, str(i), *rest] for i in range(count)])
    for process in ended:
        assert process.code == 0, process.output
    lines = [[x for x in p.output.splitlines() if x[:2] == "[["] for p in ended]
    wanted = [texts(number, tmp_path / "one") for number in cases]
    assert lines == [wanted] * count


def generate(folder, *more, count) -> list[Ended]:
    """`zinf generate` in so many processes, of two devices each."""
    at, lines = f"--coordinator=127.0.0.1:{free_port()}", []
    for index in range(count):
        line = ["nothing", 0, "generate", folder, *more]
        if count > 1:
            line += [at, f"--num-processes={count}", f"--process-id={index}"]
        lines.append([str(part) for part in line])
    return run_all("command", lines)


def test_the_command_writes_what_one_process_does_and_goes_on(tmp_path):
    folder = model_folder(tmp_path)
    prompts = [{"prompt": f"w{i} w{2 * i + 3}" * (1 + i % 3)} for i in range(11)]
    given = ["--prompts", write(tmp_path / "prompts.jsonl", prompts)]
    given += ["--max-new-tokens", 8, "--temperature", 0.8, "--batch-size", 4]
    written = []
    for count in (1, 2):
        output = tmp_path / f"{count}.jsonl"
        if count > 1:
            # As if a command was stopped.
            output.write_text("".join(written[0].splitlines(keepends=True)[:5]))
        ended = generate(folder, *given, "--output", output, count=count)
        for process in ended:
            assert process.code == 0, process.output
        written.append(output.read_text())
    assert "has 5 of 11 lines already" in ended[0].output
    assert "lines" not in ended[1].output
    assert written[1] == written[0] and len(set(written[0].splitlines())) > 5


def test_the_command_writes_after_images_what_one_process_does(tmp_path):
    """All processes show the images, and each device has them for its own rows."""
    folder = images.model_folder("llava", tmp_path / "model")
    given = ["--prompt", "w1 w2", "--max-new-tokens", 8, "--temperature", 0.8]
    for i in range(2):
        images.picture(i).save(tmp_path / f"{i}.png")
        given += ["--image", tmp_path / f"{i}.png"]
    written = []
    for count in (1, 2):
        ended = generate(folder, *given, count=count)
        for process in ended:
            assert process.code == 0, process.output
        written.append(ended[0].output.splitlines()[-1])
    assert written[1] == written[0] and len(written[0].split()) > 3
    assert written[0] not in ended[1].output
