"""verl's configurations: YAML of Hydra, or a script that gives its keys (`main_ppo a.b=c`)."""

from __future__ import annotations

from typing import Any

from silva.conversion.configs.carried import Carried, number, real, share, steps, texts, whole

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
ESTIMATORS = {
    "grpo": "grpo",
    "gae": "ppo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "opo": "opo",
    "gpg": "gpg",
}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "constant",
}
ESTIMATES = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear"}

REASONS = {
    "*micro_batch_size*": "micro-batches are cut by tokens: trainer.micro_batch_tokens; the gradient is "
    "the same",
    "*use_dynamic_bsz": "batches are always cut by tokens",
    "*max_token_len_per_gpu": "trainer.micro_batch_tokens holds for all passes",
    "*fsdp_config*": "trainer.parallel says how a model is divided among ranks (docs/services.md)",
    "*use_remove_padding": "there is never any padding",
    "*ulysses_sequence_parallel_size": 'trainer.parallel.cp, with cp_style = "ulysses"',
    "*tensor_model_parallel_size": 'engine.tensor_parallel, with engine.type = "vllm" (docs/services.md)',
    "*gpu_memory_utilization": 'engine.gpu_memory, with engine.type = "vllm"',
    "*enforce_eager": 'engine.enforce_eager, with engine.type = "vllm"',
    "actor_rollout_ref.rollout.*": 'a setting of verl\'s engine; see engine.type = "vllm" in '
    "docs/services.md",
    "actor_rollout_ref.ref.*": "the reference is computed with the policy's own cut",
    "actor_rollout_ref.hybrid_engine": "trainer and engine share weights unless placement says otherwise",
    "trainer.n_gpus_per_node": "placement, trainer.ranks and trainer.parallel say what runs where",
    "trainer.nnodes": "placement says what runs where (docs/cluster.md)",
    "trainer.default_local_dir": "output_dir holds a folder for each run",
    "trainer.rollout_data_dir": "rollouts/ in the folder of the run has every episode",
    "trainer.val_before_train": "a run always begins with an evaluation",
    "trainer.resume_mode": "silva rl --resume goes on",
    "trainer.critic_warmup": "trainer.critic.warmup counts updates, not steps",
    "data.prompt_key": "environments.prompt, where it is not recognised",
    "data.filter_overlong_prompts*": "a prompt without room for a reply ends its episode, and is counted",
    "data.truncation": "prompts are never cut",
    "data.*": "how rows are loaded; see docs/datasets.md",
    "reward_model.*": "environments.reward says what grades a dialogue (docs/rewards.md)",
    "critic.*": "of critics only the learning rate is carried over: see trainer.critic",
    "ray_init.*": 'placement.type = "ray" (docs/cluster.md)',
    "trainer.*": "no equal; the folder of a run holds everything",
}


def convert(draft: Carried) -> None:
    common(draft)
    data(draft)
    draft.rest(REASONS)


def common(draft: Carried) -> None:
    """All but data, which RAGEN and ARPO have otherwise."""
    _model(draft)
    _sizes(draft)
    _algorithm(draft)
    _optimizer(draft)
    _sampling(draft)
    if not run(draft) and draft.take("trainer.total_epochs"):
        batch = draft.values.get("rollout.groups_per_step", "groups_per_step")
        draft.note("trainer.total_epochs", f"set steps: rows of the data times this, divided by {batch}")


def _model(draft: Carried) -> None:
    name = draft.move("model.name", f"{MODEL}.path")
    if any(sign in str(name) for sign in ("$", "<")):
        draft.note(f"{MODEL}.path", "fill it in")
    if rank := number(draft.take(f"{MODEL}.lora_rank")):
        draft.set("model.lora.rank", rank, f"{MODEL}.lora_rank")
        draft.move("model.lora.alpha", f"{MODEL}.lora_alpha", change=real)
    else:
        draft.take(f"{MODEL}.lora_alpha")
    targets = draft.take(f"{MODEL}.target_modules")
    if rank and isinstance(targets, list):
        draft.set("model.lora.targets", targets, f"{MODEL}.target_modules")
    draft.move("trainer.gradient_checkpointing", f"{MODEL}.enable_gradient_checkpointing", change=bool)


def _sizes(draft: Carried) -> None:
    batch = draft.move("rollout.groups_per_step", "data.train_batch_size", change=number)
    group = draft.move("rollout.group_size", f"{ROLLOUT}.n", usual=1, change=number)
    updates = share(batch, draft.take(f"{ACTOR}.ppo_mini_batch_size"))
    if updates:
        draft.set("trainer.updates_per_step", updates, f"{ACTOR}.ppo_mini_batch_size")
    if (epochs := number(draft.take(f"{ACTOR}.ppo_epochs", 1))) != 1:
        draft.note(f"{ACTOR}.ppo_epochs", f"each row is trained once a step, not {epochs} times")
    if group == 1 and draft.take("algorithm.adv_estimator") == "grpo":
        draft.note("", "rollout.n is 1, so a group has one episode and nothing to compare it with")
    draft.move("trainer.micro_batch_tokens", f"{ACTOR}.ppo_max_token_len_per_gpu", change=whole)
    draft.lengths("data.max_prompt_length", "data.max_response_length")
    draft.move(
        "rollout.limits.max_turns",
        *(f"{ROLLOUT}.multi_turn.{key}" for key in ("max_turns", "max_assistant_turns")),
    )


def _algorithm(draft: Carried) -> None:
    estimator = str(draft.take("algorithm.adv_estimator", "gae"))
    if estimator not in ESTIMATORS:
        draft.note(
            "algorithm.adv_estimator", "no equal; grpo stands in its place (docs/algorithms.md has them all)"
        )
    draft.set("algorithm.type", ESTIMATORS.get(estimator, "grpo"), "algorithm.adv_estimator")
    if estimator == "grpo" and draft.take("algorithm.norm_adv_by_std_in_grpo", True) is False:
        draft.set("algorithm.advantage", "mean", "algorithm.norm_adv_by_std_in_grpo")
    if estimator == "gae":
        for key in ("gamma", "lam"):
            draft.move(f"algorithm.{key}", f"algorithm.{key}", change=real)
        draft.move("trainer.critic.optimizer.lr", "critic.optim.lr", change=real)
    else:
        for key in ("gamma", "lam"):
            draft.take(f"algorithm.{key}")
    mode = str(draft.take(f"{ACTOR}.loss_agg_mode", "token-mean"))
    draft.set("algorithm.aggregation", AGGREGATIONS.get(mode, "token_mean"), f"{ACTOR}.loss_agg_mode")
    loss = {"type": "clipped"}
    clip = real(draft.take(f"{ACTOR}.clip_ratio", 0.2))
    if draft.take(f"{ACTOR}.policy_loss.loss_mode") == "gspo":
        loss["type"] = "gspo"
    for side in ("low", "high"):
        value = real(draft.take(f"{ACTOR}.clip_ratio_{side}", clip))
        draft.set(f"algorithm.loss.clip_{side}", value, f"{ACTOR}.clip_ratio_{side}", f"{ACTOR}.clip_ratio")
    draft.set("algorithm.loss.type", loss["type"], f"{ACTOR}.policy_loss.loss_mode")
    if loss["type"] == "clipped":
        draft.set(
            "algorithm.loss.clip_dual",
            real(draft.take(f"{ACTOR}.clip_ratio_c", 3.0)),
            f"{ACTOR}.clip_ratio_c",
        )
    _kl(draft)
    draft.move("algorithm.entropy_coef", f"{ACTOR}.entropy_coeff", usual=0.0, change=real)
    buffer = "reward_model.overlong_buffer"
    if draft.take(f"{buffer}.enable") is True:
        part, whole = number(draft.take(f"{buffer}.len")), number(draft.take("data.max_response_length", 512))
        if isinstance(part, int) and isinstance(whole, int) and 0 < part <= whole:
            draft.set("algorithm.overlong_buffer", part / whole, f"{buffer}.len", "data.max_response_length")
        if real(draft.take(f"{buffer}.penalty_factor", 1.0)) != 1.0:
            draft.note(f"{buffer}.penalty_factor", "a reply that is too long costs a reward of 1 at most")
    if draft.take("algorithm.filter_groups.enable"):
        refills = number(draft.take("algorithm.filter_groups.max_num_gen_batches", 0))
        draft.set("algorithm.max_refills", refills or 10, "algorithm.filter_groups.max_num_gen_batches")
    else:
        draft.set("algorithm.max_refills", 0)
        draft.set("algorithm.drop_zero_variance", False)


def _kl(draft: Carried) -> None:
    coefficient = real(draft.take(f"{ACTOR}.kl_loss_coef", 0.001))
    kind = draft.take(f"{ACTOR}.kl_loss_type", "low_var_kl")
    if draft.take(f"{ACTOR}.use_kl_loss", False) is True and coefficient:
        draft.set("algorithm.kl_coef", coefficient, f"{ACTOR}.kl_loss_coef")
        draft.set(
            "algorithm.kl_estimator", ESTIMATES.get(str(kind).rstrip("+"), "k3"), f"{ACTOR}.kl_loss_type"
        )
        draft.set("algorithm.kl_bias_correction", False)  # verl's loss is the plain estimator
    else:
        draft.set("algorithm.kl_coef", 0.0, f"{ACTOR}.use_kl_loss")
    in_reward = real(draft.take("algorithm.kl_ctrl.kl_coef", 0.001))
    if draft.take("algorithm.use_kl_in_reward", False) is True and in_reward:
        draft.set("algorithm.kl_reward_coef", in_reward, "algorithm.kl_ctrl.kl_coef")
    for key in ("algorithm.kl_penalty", "algorithm.kl_ctrl.type"):
        draft.take(key)


def _optimizer(draft: Carried) -> None:
    optim = f"{ACTOR}.optim"
    draft.move("trainer.optimizer.lr", f"{optim}.lr", usual=1e-6, change=real)
    draft.move(
        "trainer.optimizer.betas", f"{optim}.betas", change=lambda betas: [float(each) for each in betas]
    )
    draft.move("trainer.optimizer.weight_decay", f"{optim}.weight_decay", usual=0.01, change=real)
    draft.move("trainer.optimizer.max_grad_norm", f"{ACTOR}.grad_clip", usual=1.0, change=real)
    key = draft.first(f"{optim}.lr_scheduler_type", f"{optim}.warmup_style")
    style = draft.take(key, "constant") if key else "constant"
    draft.set("trainer.optimizer.schedule", SCHEDULES.get(str(style), "constant"), key)
    draft.move("trainer.optimizer.min_lr_ratio", f"{optim}.min_lr_ratio", change=real)
    warmup = number(draft.take(f"{optim}.lr_warmup_steps", -1))
    part = real(draft.take(f"{optim}.lr_warmup_steps_ratio", 0.0))
    if isinstance(warmup, int) and warmup > 0:
        draft.set(
            "trainer.optimizer.warmup",
            warmup * draft.values.get("trainer.updates_per_step", 1),
            f"{optim}.lr_warmup_steps",
        )
    elif part:
        draft.note(f"{optim}.lr_warmup_steps_ratio", f"set trainer.optimizer.warmup to {part} of all updates")


def _sampling(draft: Carried) -> None:
    for ours, at in (("rollout.sampling", ROLLOUT), ("eval.sampling", f"{ROLLOUT}.val_kwargs")):
        draft.move(f"{ours}.temperature", f"{at}.temperature", change=real)
        draft.move(f"{ours}.top_p", f"{at}.top_p", change=real)
        top_k = number(draft.take(f"{at}.top_k", -1))
        if isinstance(top_k, int) and top_k > 0:
            draft.set(f"{ours}.top_k", top_k, f"{at}.top_k")
    if draft.take(f"{ROLLOUT}.val_kwargs.do_sample", False) is not True:
        draft.set("eval.sampling.temperature", 0.0, f"{ROLLOUT}.val_kwargs.do_sample")
    draft.move("eval.samples_per_task", f"{ROLLOUT}.val_kwargs.n", change=number)
    if (engine := draft.take(f"{ROLLOUT}.name")) and engine != "hf":
        draft.note(
            f"{ROLLOUT}.name",
            'the engine is in the trainer\'s process; engine.type = "vllm" with '
            'placement.type = "services" launches vLLM (docs/services.md)',
        )


def run(draft: Carried) -> bool:
    """The run's own keys; whether it has a number of steps."""
    draft.move("name", "trainer.experiment_name", change=lambda name: str(name).replace("/", "-"))
    counted = draft.move("steps", "trainer.total_training_steps", change=number) is not None
    if counted:
        draft.take("trainer.total_epochs")
    draft.move("eval.every", "trainer.test_freq", change=steps)
    draft.move("checkpoint.every", "trainer.save_freq", change=steps)
    loggers = texts(draft.take("trainer.logger"))
    project = draft.take("trainer.project_name", "silva")
    known = [name for name in ("wandb", "mlflow", "trackio") if name in loggers]
    if known:
        field = {"mlflow": "experiment"}
        draft.set("monitoring.sinks", [{"type": n, field.get(n, "project"): str(project)} for n in known])
    return counted


def data(draft: Carried) -> None:
    train, held_out = (_one_file(draft, f"data.{part}_files") for part in ("train", "val"))
    environment: dict[str, Any] = {"type": "dataset", "path": train or "train.parquet"}
    if held_out:
        environment["eval_path"] = held_out
    path, name = (draft.take(f"custom_reward_function.{part}") for part in ("path", "name"))
    if path:
        environment["reward"] = f"{path}:{name or 'compute_score'}"
        draft.note(
            "custom_reward_function.path",
            "environments.reward: its parameters are those of verl, which "
            "docs/rewards.md#your-own compares with Silva's",
        )
    else:
        environment["reward"] = "math"
        draft.note(
            "",
            "verl chooses a reward by data_source of each row; here an environment has one: "
            "environments.reward (docs/rewards.md)",
        )
    draft.environments.append(environment)


def _one_file(draft: Carried, key: str) -> str:
    value = draft.take(key)
    files = value if isinstance(value, list) else [value] if value else []
    if any(sign in str(files) for sign in ("$", "<")):
        draft.note(key, "fill in the path")
    if len(files) > 1:
        draft.note(
            key, f"the first of {len(files)} files; give each one an [[environments]] table of its own"
        )
    return str(files[0]) if files else ""
