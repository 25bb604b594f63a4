"""Commands take the lines of users of TRL and axolotl, or say why not."""

import shlex

import pytest
import typer.main

from zinf.cli import app, trl
from zinf.cli.options import DRAWN, FINETUNE
from zinf.cli.trl import AXOLOTL as AXOLOTL_NAMES
from zinf.cli.trl import (
    KEYS,
    OTHERWISE,
    REFUSED,
    RENAMED,
    keys_of_drawn,
    translated,
)
from zinf.core.config import Config
from zinf.core.optim.transforms.schedules import schedule_of

SFT = """--model_name_or_path Qwen/Qwen2-0.5B --data a.jsonl --learning_rate 2.0e-5
--num_train_epochs 1 --packing --per_device_train_batch_size 2
--gradient_accumulation_steps 8 --gradient_checkpointing --eval_strategy steps
--eval_steps 100 --output_dir tuned"""
LORA = """Qwen/Qwen2-0.5B --data a.jsonl --learning_rate 2.0e-4 --output_dir tuned
--use_peft --lora_r 32 --lora_alpha 16 --lora_target_modules q_proj v_proj
--load_in_4bit --max_length=512 --bf16 True --packing False"""
DPO = """--model_name_or_path Qwen/Qwen2-0.5B-Instruct --objective dpo --data a.jsonl
--learning_rate 5.0e-7 --max_steps 1000 --gradient_accumulation_steps 8
--output_dir tuned --no_remove_unused_columns --lr_scheduler_type cosine
--warmup_ratio 0.03 --report_to tensorboard"""
AXOLOTL = """--base-model NousResearch/Llama-3.2-1B --data a.jsonl --val-set-size 0.1
--output-dir tuned --adapter lora --sequence-len 2048 --sample-packing true --lora-r 16
--lora-alpha 32 --lora-dropout 0.05 --lora-target-modules q_proj v_proj
--gradient-accumulation-steps 2 --micro-batch-size 2 --num-epochs 1
--optimizer adamw_8bit --lr-scheduler cosine --learning-rate 0.0002 --bf16 auto
--tf32 false --gradient-checkpointing true --logging-steps 1 --flash-attention true
--warmup-ratio 0.1 --eval-steps 50 --evals-per-epoch 4 --saves-per-epoch 1
--weight-decay 0.0"""
LINES = {
    "axolotl's lora-1b.yml, its keys as options": AXOLOTL,
    "axolotl's other adapter": "m --adapter qlora --train-on-inputs true",
    "an adapter in a folder": "m --adapter ./lora",
    "axolotl's long samples": "m --excess-length-strategy drop",
    "axolotl's data sets": "m --datasets tatsu-lab/alpaca",
    "TRL's sft.py": SFT,
    "TRL's sft.py with adapters": LORA,
    "TRL's dpo.py": DPO,
    "another loss of DPO": "m --objective dpo --loss_type ipo --beta 0.2",
    "its usual loss": "m --loss-type sigmoid",
    "a loss of none": "m --objective dpo --loss-type hinge",
    "a loss of DPO for another": "m --objective simpo --loss-type ipo",
    "evaluations": "m --data a --eval_data b --eval_steps 20 --logging_steps 1",
    "a warm-up alone": "m --warmup-steps 10 --weight-decay 0.01 --max-grad-norm 0.5",
    "a constant rate after it": "m --lr-scheduler-type constant_with_warmup",
    "a constant rate": "m --lr-scheduler-type constant",
    "all linear layers": "m --use-peft --lora-target-modules all-linear",
    "betas and fp16": "m --adam-beta2 0.95 --fp16 True --seed 3 --optim adamw_torch",
    "checkpoints": "m --save-steps 50 --save-total-limit 2 --resume-from-checkpoint 1",
    "zinf's own": "m --data a --data b --set run.seed=1 --no-merge --lora 4",
    "all losses": "m --completion-only-loss False",
    "two sizes of a batch": "m --samples 4 --gradient-accumulation-steps 2",
    "a data set of the hub": "m --dataset_name trl-lib/Capybara",
    "noise": "m --neftune-noise-alpha 5",
    "another schedule": "m --lr-scheduler-type polynomial",
    "another tracker": "m --report-to wandb",
    "moments in 8 bits": "m --optim adamw_bnb_8bit",
    "moments in pages": "m --optim paged_adamw_32bit",
    "another optimizer": "m --optim adafactor",
    "another checkpoint": "m --resume-from-checkpoint out/checkpoint-10",
    "a key of zinf grpo": "m --delta 2",
    "unknown": "m --no-such-option 3",
}
OF_GRPO = {
    "TRL's grpo.py": """--model_name_or_path Qwen/Qwen2-0.5B-Instruct --data a.jsonl
--output_dir tuned --reward_funcs r.py:correct r.py:short --reward_weights 1 0.5
--num_generations 8 --max_completion_length 64 --loss_type dr_grpo --beta 0.04
--delta 2 --shuffle_dataset False --use_vllm --vllm_mode colocate --log_completions
--per_device_train_batch_size 8 --gradient_accumulation_steps 2 --use_peft""",
    "prompts that are cut": "m --reward r.py:correct --max_prompt_length 512",
}


def own_options(command="finetune"):
    return trl.own_options(typer.main.get_command(app).commands[command])


OF_PPO = {
    "TRL's ppo.py": """--model_name_or_path EleutherAI/pythia-1b-deduped --data a.jsonl
--reward_model_path judge --learning_rate 3e-6 --output_dir tuned --num_ppo_epochs 1
--num_mini_batches 1 --per_device_train_batch_size 64 --gradient_accumulation_steps 1
--response_length 53 --stop_token eos --missing_eos_penalty 1.0 --kl_coef 0.05
--num_sample_generations 10 --whiten_rewards True""",
}
OPTIONS = {
    f"{table}{name}": option
    for table, options in {"": FINETUNE, **DRAWN}.items()
    for name, option in options.items()
}


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_an_option_sets_a_key_that_the_config_has(option):
    *sections, name = option.key.split(".")
    section, beside = Config, {"type": "AdamW"}
    for below in sections:
        section = section.section_at(below, beside)
        assert section is not None, option.key
    assert name in section.model_fields
    if option.default is not None:
        assert section.model_fields[name].default == option.default


def test_each_line_becomes_options_of_zinf_or_a_reason(golden):
    lines = [(own_options(), *line) for line in LINES.items()]
    lines += [(own_options("grpo"), *line) for line in OF_GRPO.items()]
    lines += [(own_options("ppo"), *line) for line in OF_PPO.items()]
    found = []
    for own, title, line in lines:
        said = []
        try:
            arguments = shlex.join(translated(shlex.split(line), own, say=said.append))
        except ValueError as error:
            arguments = f"refused: {error}"
        found += [f"{title}:", *(f"  {x}" for x in [arguments, *said])]
    golden.check("trl_options.txt", "\n".join(found))


@pytest.mark.parametrize("command", DRAWN)
def test_no_name_has_two_meanings_and_all_lead_somewhere(command):
    names = {*own_options(), *own_options(command)}
    own = {name.removeprefix("--") for name in names}
    assert {*RENAMED.values()} <= own
    of_command = keys_of_drawn(own_options(command))
    keys = {key.removeprefix(f"{command}.") for key in of_command.values()}
    assert keys <= {*Config.section_at(command, {}).model_fields}
    tables = [*AXOLOTL_NAMES, *RENAMED, *KEYS, *of_command, *OTHERWISE, *REFUSED]
    assert len({*tables}) == len(tables) and own.isdisjoint(tables)


def test_what_becomes_of_keys_is_a_config():
    given = translated(shlex.split(DPO), own_options(), say=lambda text: None)
    keys = [given[i + 1] for i, word in enumerate(given) if word == "--set"]
    raw = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-7}},
        "run": {"steps": 1000},
    }
    config = Config.load(raw, keys)
    assert (config.batch_size, config.num_microbatches) == (64, 8)
    params = config.scheduler.params
    counted = params.model_copy(update={"warmup_ratio": None, "warmup_num_steps": 30})
    rates = [
        [
            float(schedule_of(x, lr=5e-7, num_steps=1000)(count))
            for count in (1, 29, 500)
        ]
        for x in (params, counted)
    ]
    assert params.warmup_ratio == 0.03 and rates[0] == rates[1]
