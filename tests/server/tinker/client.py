"""What the SDK sends, one request at a time."""

from __future__ import annotations

import numpy as np

from silva.server.tinker import messages


class Client:
    """One session of one key."""

    def __init__(self, http, **headers):
        self.http, self.headers = http, headers

    async def post(self, where, /, **body):
        return await self.http.post(where, json=body, headers=self.headers)

    async def begin(self):
        self.session = (await self.post("/create_session", tags=[], sdk_version="0")).json()["session_id"]
        return self

    async def model(self, number=0, **lora):
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "base"}
        answer = await self.post("/create_model", **body, lora_config={"rank": 4, "seed": 1, **lora})
        assert await self.result(answer) == {
            "model_id": f"{self.session}:train:{number}", "type": "create_model"
        }  # fmt: skip
        return f"{self.session}:train:{number}"

    async def passed(self, model, seq, value=1.0, **how):
        content = self.message(model, seq, value, **how).SerializeToString()
        headers = {**self.headers, "content-type": messages.TAKES}
        return await self.http.post("/forward_backward", content=content, headers=headers)

    def message(self, model, seq, value=1.0, *, forward=False, targets=(1, 2), loss="cross_entropy"):
        message = messages.MESSAGES["ForwardBackwardRequest"](
            model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward
        )
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([3, 4], np.int32).tobytes()
        field = "weights" if loss == "cross_entropy" else "advantages"
        for name, dtype, kind, array in (
            ("target_tokens", np.int64, 2, targets), (field, np.float32, 1, [value, 0.0]),
        ):  # fmt: skip
            datum.loss_fn_inputs[name].dense = np.array(array, dtype).tobytes()
            datum.loss_fn_inputs[name].dtype = kind
        return message

    async def step(self, model, seq, lr=1.0):
        return await self.post("/optim_step", model_id=model, seq_id=seq, adam_params={"learning_rate": lr})

    async def result(self, answer):
        assert answer.status_code == 200, answer.text
        while True:
            found = await self.post("/retrieve_future", request_id=answer.json()["request_id"])
            assert found.status_code == 200, found.text
            if b'"try_again"' not in found.content:
                break
        if found.headers["content-type"] != messages.TAKES:
            return found.json()
        output = messages.MESSAGES["ForwardBackwardOutput"]()
        output.ParseFromString(found.content)
        return dict(output.metrics)
