"""The real SDK, unmodified, against a server that listens: what docs/tinker.md says works, and what is
refused. The numbers are those of the doubles."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from chaos_tinker import free_port
from tests.server.running import certificate
from tests.server.tinker.conftest import Service

from silva.server.tinker import messages
from silva.wire.listening import Bind

tinker = pytest.importorskip("tinker", reason="needs tinker: pip install tinker")
from tinker import types  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
PROMPT = types.ModelInput.from_ints([5, 6, 7])
RL = ("importance_sampling", "ppo", "cispo", "dro", "gspo")


@pytest.fixture(scope="module")
def service(listening: Service) -> Service:
    return listening


@pytest.fixture(scope="module")
def rest(service: Service):
    return tinker.RestClient()


@pytest.fixture
def trained(client):
    return client.create_lora_training_client(base_model="base", rank=8, seed=3).result()


def ce(value=1.0, targets=(1, 2)):
    inputs = {"target_tokens": np.array(targets, np.int64), "weights": np.array([value, 0], np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints([3, 4]), loss_fn_inputs=inputs)


def rl(value=1.0):
    arrays = {name: np.array([value, 0], np.float32) for name in ("logprobs", "advantages")}
    arrays["clip_low_threshold"] = np.full(2, 0.9, np.float32)
    inputs = {"target_tokens": np.array([1, 2], np.int64), **arrays}
    return types.Datum(model_input=types.ModelInput.from_ints([3, 4]), loss_fn_inputs=inputs)


def step(trained, lr=1.0):
    return trained.optim_step(types.AdamParams(learning_rate=lr))


def failed(future) -> str:
    with pytest.raises(tinker.TinkerError) as raised:
        future.result()
    return str(raised.value)


def test_a_model_is_made_with_the_rank_the_seed_and_the_modules_that_were_asked_for(client, service):
    made = client.create_lora_training_client(
        base_model="base", rank=4, seed=7, train_mlp=False, train_unembed=False, user_metadata={"a": "b"}
    ).result()
    found = service.runs.made[made.model_id]
    assert found == {"rank": 4, "alpha": 32.0, "seed": 7, "attn": True, "mlp": False, "unembed": False}
    info = made.get_info()
    assert (info.model_id, info.lora_rank, info.model_data.model_name) == (made.model_id, 4, "base")
    drawn = client.create_lora_training_client(base_model="base", rank=4).result()
    assert service.runs.made[drawn.model_id]["seed"] > 1 << 32
    with pytest.raises(tinker.BadRequestError, match="this server has 'base'"):
        client.create_lora_training_client(base_model="other").result()
    with pytest.raises(tinker.BadRequestError, match="type"):
        client.create_lora_training_client(
            base_model="base", optimizer=types.DimuonOptimizerConfig()
        ).result()


def test_passes_and_steps_are_sent_ahead_and_done_in_order(trained, service):
    futures = []
    for value in (1.0, 2.0, 3.0):
        futures.append((trained.forward_backward([ce(value), ce(value)], "cross_entropy"), step(trained)))
    results = [(passed.result(), stepped.result()) for passed, stepped in futures]
    assert [stepped.metrics["gradient:mean"] for _, stepped in results] == [2.0, 4.0, 6.0]
    weights = [0.0, 2.0, 0.9 * 2.0 + 4.0]
    for (passed, _), weight in zip(results, weights, strict=True):
        assert [each["logprobs"].tolist() for each in passed.loss_fn_outputs] == [
            np.float32([weight - 2, weight - 3]).tolist()
        ] * 2
    called = next(call for call in service.runs.calls if call[:2] == ("optim_step", trained.model_id))
    assert (called[2].lr, called[2].beta2, called[2].eps, called[2].grad_clip_norm) == (1.0, 0.95, 1e-12, 0.0)


def test_forward_alone_leaves_no_gradient(trained):
    assert trained.forward([ce(5.0)], "cross_entropy").result().metrics == {"loss:sum": 10.0}
    assert step(trained).result().metrics == {"gradient:mean": 0.0}


def test_every_loss_is_passed_on(trained, service, monkeypatch):
    seen = []
    real = service.runs._passed
    monkeypatch.setattr(service.runs, "_passed", lambda asked: (seen.append(asked), real(asked))[1])
    for loss in RL:
        assert trained.forward_backward([rl(2.0)], loss).result().metrics == {"loss:sum": 4.0}
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    trained.forward_backward([rl(2.0)], "ppo", config).result()
    assert [(each.loss, dict(each.params)) for each in seen] == [
        *((loss, {}) for loss in RL),
        ("ppo", config),
    ]
    assert set(seen[0].data[0].inputs) == {"logprobs", "advantages", "clip_low_threshold"}
    assert "got 'stable_reinforce'" in failed(trained.forward_backward([rl()], "stable_reinforce"))


def test_a_loss_of_the_client_becomes_a_gradient(trained):
    def loss(data, logprobs):
        return sum((each**2).sum() for each in logprobs), {"mine:mean": 1.0}

    found = trained.forward_backward_custom([ce(), ce()], loss).result()
    assert found.metrics["loss:sum"] == 2 * (4 + 9) and found.metrics["mine:mean"] == 1.0
    assert step(trained).result().metrics["gradient:mean"] == 2 * (2 * 2 + 2 * 3)  # -dC/dlogp, as weights


def test_a_loss_that_is_traced_runs_in_the_client(client, trained):
    def twice(logprobs, weights):
        return -2 * (logprobs * weights).sum(), {}

    made = client.create_custom_loss(twice, {"logprobs": 1, "weights": 1}).result()
    assert trained.forward_backward_custom([ce(2.0)], made).result().metrics["loss:sum"] == 8.0
    assert step(trained).result().metrics["gradient:mean"] == 4.0


def test_a_call_of_10_000_datums_is_one_gradient(trained, service, monkeypatch):
    """Its parts are compressed on their way."""
    before, sent, opened = len(service.runs.together), [], messages.opened

    def noted(data, coding):
        found = opened(data, coding)
        sent.append((coding, len(found) / len(data) > 10))
        return found

    monkeypatch.setattr(messages, "opened", noted)
    found = trained.forward_backward([ce(1.0, (n, n)) for n in range(10_000)], "cross_entropy").result()
    assert len(found.loss_fn_outputs) == 10_000
    assert [each["logprobs"].tolist()[0] for each in found.loss_fn_outputs[:8]] == [
        -1,
        -2,
        -3,
        -4,
        -5,
        -6,
        -7,
        -1,
    ]
    assert step(trained).result().metrics["gradient:mean"] == 10_000
    assert len(service.runs.together) - before == 10
    assert sent == [("zstd", True)] * 10


def test_a_wrong_datum_is_told_and_the_client_goes_on(trained):
    assert "expected 2" in failed(trained.forward_backward([ce(1.0, (1, 2, 3))], "cross_entropy"))
    assert "not finite" in failed(trained.forward_backward([ce(float("nan"))], "cross_entropy"))
    assert trained.forward_backward([ce()], "cross_entropy").result().metrics == {"loss:sum": 2.0}


def test_a_state_comes_back_with_and_without_its_optimizer(trained, client, service):
    trained.forward_backward([ce(4.0)], "cross_entropy").result()
    step(trained).result()
    path = trained.save_state("a", user_metadata={"step": "1"}).result().path
    assert path == f"tinker://{trained.model_id}/weights/a"
    assert "there is one of this name" in failed(trained.save_state("a"))
    assert trained.save_state("a", overwrite=True).result().path == path
    for make, optimizer in (
        (client.create_training_client_from_state, False),
        (client.create_training_client_from_state_with_optimizer, True),
    ):
        again = make(path).result()
        assert service.runs.weights[again.model_id] == 4.0 and again.get_info().lora_rank == 8
        assert ("load", again.model_id, optimizer) in service.runs.calls
        again.forward_backward([ce(1.0)], "cross_entropy").result()
        step(again).result()
        assert service.runs.weights[again.model_id] == 0.9 * 4.0 + 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained.load_state(path).result()
        trained.load_state_with_optimizer(path).result()
    loads = [call for call in service.runs.calls if call[:2] == ("load", trained.model_id)]
    assert [call[2] for call in loads] == [False, True]
    with pytest.raises(tinker.NotFoundError):
        client.create_training_client_from_state(f"tinker://{trained.model_id}/weights/b").result()


def test_saved_weights_are_sampled_from_by_name_or_at_once(trained, client, service):
    trained.forward_backward([ce(4.0)], "cross_entropy").result()
    step(trained).result()
    path = trained.save_weights_for_sampler("s").result().path
    assert path == f"tinker://{trained.model_id}/sampler_weights/s"
    named = client.create_sampling_client(model_path=path).result()
    own = trained.create_sampling_client(path).result()
    at_once = trained.save_weights_and_get_sampling_client().result()
    inflight = trained.save_weights_and_get_sampling_client(kind="inflight").result()
    trained.forward_backward([ce(1.0)], "cross_entropy").result()
    step(trained).result()
    params = types.SamplingParams(max_tokens=2)
    for sampler in (named, own, at_once, inflight):
        (sequence,) = sampler.sample(PROMPT, 1, params).result().sequences
        assert (sequence.tokens, sequence.logprobs) == ([8, 9], [4.0, 3.0])
        assert sampler.get_base_model() == "base"
    base = client.create_sampling_client(base_model="base").result()
    assert base.sample(PROMPT, 1, params).result().sequences[0].logprobs == [0.0, -1.0]
    assert ("save", trained.model_id, False) in service.runs.calls
    restored = tinker.SamplingClient.from_sampler_handle(named.get_sampler_handle())
    assert restored.sample(PROMPT, 1, params).result().sequences[0].tokens == [8, 9]


def test_sampling_has_all_that_was_asked_for(client, service):
    sampler = client.create_sampling_client(base_model="base").result()
    params = types.SamplingParams(max_tokens=9, seed=4, stop=["x", "yz"], temperature=0.5, top_k=3, top_p=0.9)
    found = sampler.sample(PROMPT, 3, params).result()
    assert [each.tokens for each in found.sequences] == [list(range(8, 17))] * 3
    assert len({each.sequence_id for each in found.sequences}) == 3
    given = [params for tokens, params in service.sampler.asked][-3:]
    assert len({each.seed for each in given}) == 3
    assert (given[0].temperature, given[0].top_k, given[0].top_p) == (0.5, 3, 0.9)
    assert given[0].stop == ("x", "yz") and given[0].stop_token_ids == (63,)
    sampler.sample(PROMPT, 3, params).result()
    assert [each.seed for _, each in service.sampler.asked[-3:]] == [each.seed for each in given]
    ended = sampler.sample(PROMPT, 1, types.SamplingParams(stop=[10])).result().sequences[0]
    assert (ended.tokens, ended.stop_reason) == ([8, 9, 10], "stop")
    whole = sampler.sample(PROMPT, 1, types.SamplingParams(stop=[])).result().sequences[0]
    assert (len(whole.tokens), whole.stop_reason) == (125, "length")  # what the context has room for


def test_log_probabilities_of_prompts(client):
    sampler = client.create_sampling_client(base_model="base").result()
    assert sampler.compute_logprobs(PROMPT).result() == [None, -6.0, -7.0]
    assert sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result() == [None, None, -7.0]
    found = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True,
                           topk_prompt_logprobs=2).result()  # fmt: skip
    assert found.prompt_logprobs == [None, -6.0, -7.0]
    assert found.topk_prompt_logprobs == [None, [(6, -0.5), (7, -1.5)], [(7, -0.5), (8, -1.5)]]


def test_sampling_that_cannot_be_done_is_refused_with_words(client):
    sampler = client.create_sampling_client(base_model="base").result()
    params = types.SamplingParams(max_tokens=1)
    stable = client.create_sampling_client(base_model="base", record_stability_info=True).result()
    for ask, words in (
        (lambda: stable.sample(PROMPT, 1, params), "no stable_reinforce"),
        (lambda: sampler.sample(types.ModelInput.from_ints([64]), 1, params), "expected less than 64"),
        (lambda: sampler.sample(types.ModelInput.from_ints([1] * 128), 1, params), "expected 1 to 127"),
        (lambda: client.create_sampling_client(base_model="other").result(), "this server has 'base'"),
        (lambda: client.create_sampling_client(model_path="tinker://x/weights/y").result(), "not found"),
    ):  # fmt: skip
        with pytest.raises(tinker.TinkerError, match=words):
            ask().result()


def test_runs_sessions_and_checkpoints_are_listed_and_changed(trained, client, rest, service):
    again = client.create_lora_training_client(base_model="base", rank=8).result()
    path = trained.save_state("kept", ttl_seconds=7200).result().path
    sampler = trained.save_weights_for_sampler("shown").result().path
    run = rest.get_training_run(trained.model_id).result()
    assert (run.base_model, run.lora_rank, run.corrupted) == ("base", 8, False)
    assert run.last_checkpoint.tinker_path == path and run.last_sampler_checkpoint.tinker_path == sampler
    assert rest.get_training_run_by_tinker_path(path).result() == run
    listed = rest.list_training_runs(limit=1).result()
    assert [each.training_run_id for each in listed.training_runs] == [trained.model_id]
    assert listed.cursor.total_count >= 2
    other = rest.list_training_runs(limit=1, offset=1, access_scope="accessible").result()
    assert other.training_runs[0].training_run_id == again.model_id
    found = rest.list_checkpoints(trained.model_id).result().checkpoints
    assert [each.checkpoint_id for each in found] == ["weights/kept", "sampler_weights/shown"]
    assert found[0].expires_at is not None and found[0].size_bytes > 0 and not found[0].public
    assert rest.list_user_checkpoints(limit=1).result().checkpoints[0].tinker_path == sampler
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_unembed) == ("base", 8, True)
    rest.publish_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(trained.model_id).result().checkpoints[0].public
    stranger = tinker.RestClient(api_key="tml-other")
    assert stranger.get_weights_info_by_tinker_path(path).result().lora_rank == 8
    assert stranger.list_training_runs().result().training_runs == []
    with pytest.raises(tinker.NotFoundError):
        stranger.delete_checkpoint_from_tinker_path(path).result()
    theirs = tinker.ServiceClient(api_key="tml-other").create_training_client_from_state(path).result()
    assert theirs.model_id in service.runs.weights
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    first = rest.list_checkpoints(trained.model_id).result().checkpoints[0]
    assert first.expires_at is None and not first.public
    rest.delete_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint(trained.model_id, "sampler_weights/shown").result()
    assert rest.list_checkpoints(trained.model_id).result().checkpoints == []
    session = trained.model_id.partition(":")[0]
    assert session in rest.list_sessions().result().sessions
    shown = rest.get_session(session).result()
    assert trained.model_id in shown.training_run_ids and shown.user_metadata == {"who": "me"}
    assert rest.get_sampler(shown.sampler_ids[0]).result().base_model == "base"
    models = rest.get_server_capabilities().result().supported_models
    assert [(each.model_name, each.max_context_length) for each in models] == [("base", 128)]


def test_what_the_server_has_not_is_refused_with_words(trained, client, rest):
    path = f"tinker://{trained.model_id}/weights/a"
    session = trained.model_id.partition(":")[0]
    admin = tinker.AdminClient()
    for ask, words in (
        (lambda: trained.save_weights_external("x", age_encryption_recipients=["age1"]), "encrypts no files"),
        (lambda: rest.copy_weights(path, "project"), "no projects"),
        (lambda: tinker.ServiceClient(project_id="project").copy_weights(path), "no projects"),
        (lambda: rest.assign_session_project(session, "project"), "no projects"),
        (lambda: rest.list_training_runs(project_id="project"), "no projects"),
        (lambda: rest.export_session_trace(session), "no traces"),
        (lambda: admin.get_audit_log(), "no audit log"),
        (lambda: admin.get_current_checkpoint_storage_usage(), "no bills"),
        (lambda: admin.get_billing_usage("2026-01-01", "2026-01-02"), "no bills"),
        (lambda: rest.get_audit_log(), "no audit log"),
        (lambda: rest.get_current_checkpoint_storage_usage(), "no bills"),
        (lambda: rest.get_billing_usage("2026-01-01", "2026-01-02"), "no bills"),
        (
            lambda: client.create_training_client_from_state(path, weights_access_token="tml-a"),
            "access tokens",
        ),
    ):
        with pytest.raises(tinker.TinkerError, match=words):
            ask().result()
    with pytest.raises(RuntimeError, match="plain API key"):  # says the SDK
        rest.whoami().result()


def test_what_is_the_client_s_own_does_not_need_the_server(trained, client, rest):
    from tinker.lib.api_future_impl import QueueState

    sampler = client.create_sampling_client(base_model="base").result()
    every = (client, trained, sampler, rest, tinker.AdminClient())
    assert {each.get_telemetry() for each in every} == {None}  # TINKER_TELEMETRY=0
    session = trained.model_id.partition(":")[0]
    assert all(session in each.get_console_url() for each in (client, trained))
    assert sampler.on_queue_state_change(QueueState.PAUSED_CAPACITY, "why") is None


def test_a_client_that_is_closed_ends_its_session(rest):
    with tinker.ServiceClient() as own:
        made = own.create_lora_training_client(base_model="base").result()
    session = made.model_id.partition(":")[0]
    assert rest.get_session(session).result().training_run_ids == [made.model_id]


def test_sessions_are_searched(rest):
    ids, key = [], tinker.RestClient(api_key="tml-search")
    for number, status in enumerate(("success", "errored", None)):
        metadata = {"even": str(number % 2 == 0), "n": str(number)}
        own = tinker.ServiceClient(
            api_key="tml-search", display_name=f"Nightly run {number}", user_metadata=metadata
        )
        run = own.create_lora_training_client(base_model="base").result()
        if number == 0:
            size = (
                run.save_state("a").result()
                and key.list_user_checkpoints().result().checkpoints[0].size_bytes
            )
        ids.append(run.model_id.partition(":")[0])
        if status:
            own.close(status).result()

    def found(**asked):
        page = key.search_sessions(types.SessionSearchRequest(**asked)).result()
        return [ids.index(each.session_id) for each in page.sessions]

    first = key.search_sessions(types.SessionSearchRequest(limit=2)).result()
    assert [each.session_id for each in first.sessions] == ids[:0:-1]
    last = key.search_sessions(types.SessionSearchRequest(limit=2, cursor=first.next_cursor)).result()
    (oldest,) = last.sessions
    assert (oldest.session_id, last.next_cursor) == (ids[0], None)
    assert (oldest.display_name, oldest.user_metadata) == ("Nightly run 0", {"even": "True", "n": "0"})
    assert (oldest.checkpoints_count, oldest.checkpoint_storage_bytes) == (1, size)
    assert [each.status.type for each in first.sessions] == ["active", "client_finished"]
    assert first.sessions[1].status.reason.type == "errored"
    assert found(session_id=ids[1]) == [1] and found(session_id="none") == []
    assert found(display_name="RUN night") == [2, 1, 0] and found(display_name="run 1") == [1]
    assert found(display_name="run 1", session_id=ids[0]) == [1, 0]
    assert found(user_metadata={"even": "True"}) == [2, 0] and found(user_metadata={"even": "no"}) == []
    of_client, active = types.ClientFinishedSessionStatusQuery, types.ActiveSessionStatusQuery()
    assert found(statuses=[active]) == [2] and found(statuses=[of_client()]) == [1, 0]
    assert found(statuses=[of_client(reasons=["success"]), active]) == [2, 0]
    assert found(statuses=[types.FailedSessionStatusQuery()]) == []
    assert found(owner=types.AccessibleSearchOwner()) == [2, 1, 0]
    mine = types.UserSearchOwner(owner_urns=[oldest.owner])
    assert found(owner=mine) == [2, 1, 0]
    assert found(owner=types.UserSearchOwner(owner_urns=["somebody"])) == []
    theirs = rest.search_sessions(types.SessionSearchRequest(owner=mine, display_name="nightly")).result()
    assert theirs.sessions == []
    for asked, words in (
        ({"project_ids": ["p"]}, "no projects"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "none"}}, "not found"),
    ):
        with pytest.raises(tinker.TinkerError, match=words):
            key.search_sessions(types.SessionSearchRequest(**asked)).result()


def test_a_client_goes_on_while_its_server_is_killed_and_started_again(tmp_path: Path):
    own = Service(tmp_path)
    bind = Bind(port=free_port())
    with own.running(bind):
        client = tinker.ServiceClient(base_url=own.address, api_key="tml-a")
        trained = client.create_lora_training_client(base_model="base", rank=8, seed=3).result()
        trained.forward_backward([ce(1.0)], "cross_entropy").result()
        step(trained).result()
        own.runs.hold.clear()
        waiting = trained.forward_backward([ce(2.0)], "cross_entropy"), step(trained)
    with own.running(bind):
        assert waiting[1].result().metrics == {"gradient:mean": 2.0}
        trained.forward_backward([ce(3.0)], "cross_entropy").result()
        step(trained).result()
        assert own.runs.weights[trained.model_id] == 0.9 * (0.9 * 1.0 + 2.0) + 3.0


def test_a_client_comes_by_tls_if_it_trusts_the_certificate(tmp_path: Path, monkeypatch):
    own = Service(tmp_path)
    files = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", files["certificate"])
    with own.running(Bind(**files)):
        assert own.address.startswith("https://127.0.0.1:")
        trained = tinker.ServiceClient(base_url=own.address, api_key="tml-a").create_lora_training_client(
            base_model="base"
        )
        assert trained.result().forward([ce(5.0)], "cross_entropy").result().metrics == {"loss:sum": 10.0}


CLASSES = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")


def test_the_table_in_the_documentation_has_every_method_of_the_sdk():
    page = (Path(__file__).parents[3] / "docs/tinker.md").read_text()
    rows = set(re.findall(r"`(\w+Client\.\w+)`", page))
    methods = {
        f"{name}.{method}"
        for name in CLASSES
        for method in vars(getattr(tinker, name))
        if not method.startswith("_") and not method.endswith("_async")
    }
    assert rows == methods
