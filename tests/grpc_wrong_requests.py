"""Requests that are wrong, each with its status and the field that is."""

from __future__ import annotations

from grpc import StatusCode
from grpc_service import tokens

from jaxstate.serving import jaxstate_pb2 as pb

WRONG = StatusCode.INVALID_ARGUMENT


def question(count=4, **more) -> pb.Question:
    return pb.Question(prompt=tokens([30, 31]), max_new_tokens=count, **more)


def query(name, count=4, **more) -> pb.QueryRequest:
    return pb.QueryRequest(session_id=name, question=question(count), **more)


# Of a server with a session "s" of nine tokens.
REQUESTS = {
    "unknown session": (
        "GetSession",
        pb.GetSessionRequest(session_id="t"),
        StatusCode.NOT_FOUND,
        None,
    ),
    "no session": ("Append", pb.AppendRequest(prompt=tokens([1])), WRONG, "session_id"),
    "query of an unknown session": ("Query", query("t"), StatusCode.NOT_FOUND, None),
    "watch of an unknown session": (
        "WatchAnswers",
        pb.WatchAnswersRequest(session_id="t"),
        StatusCode.NOT_FOUND,
        None,
    ),
    "version of an unknown session": (
        "Query",
        query("t", min_version=1),
        StatusCode.NOT_FOUND,
        None,
    ),
    "unknown question": (
        "Unregister",
        pb.UnregisterRequest(session_id="s", flash_id=7),
        StatusCode.NOT_FOUND,
        None,
    ),
    "taken id": (
        "CreateSession",
        pb.CreateSessionRequest(session_id="s"),
        StatusCode.ALREADY_EXISTS,
        None,
    ),
    "taken id of a fork": (
        "Fork",
        pb.ForkRequest(session_id="s", new_session_id="s"),
        StatusCode.ALREADY_EXISTS,
        None,
    ),
    "crafted id": (
        "CreateSession",
        pb.CreateSessionRequest(session_id="../s"),
        WRONG,
        "session_id",
    ),
    "endless id": (
        "GetSession",
        pb.GetSessionRequest(session_id="x" * 100_000),
        WRONG,
        "session_id",
    ),
    "unknown enum": ("CreateSession", pb.CreateSessionRequest(when_full=9), WRONG, "when_full"),
    "nothing to append": ("Append", pb.AppendRequest(session_id="s"), WRONG, "prompt"),
    "id out of range": (
        "Append",
        pb.AppendRequest(session_id="s", prompt=tokens([2**32 - 1])),
        WRONG,
        "prompt",
    ),
    "prefix out of range": (
        "CreateSession",
        pb.CreateSessionRequest(prefix=tokens([2**32 - 1])),
        WRONG,
        "prefix",
    ),
    "prompt out of range": (
        "Generate",
        pb.GenerateRequest(question=pb.Question(prompt=tokens([2**32 - 1]), max_new_tokens=1)),
        WRONG,
        "prompt",
    ),
    "more than the window": (
        "Append",
        pb.AppendRequest(session_id="s", prompt=tokens([1] * 90)),
        StatusCode.FAILED_PRECONDITION,
        None,
    ),
    "nothing to roll back": (
        "Rollback",
        pb.RollbackRequest(session_id="s", tokens=1),
        StatusCode.FAILED_PRECONDITION,
        None,
    ),
    "rolling nothing back": ("Rollback", pb.RollbackRequest(session_id="s"), WRONG, "tokens"),
    "no question": ("Query", pb.QueryRequest(session_id="s"), WRONG, "question.prompt"),
    "no new tokens": ("Query", query("s", 0), WRONG, "question.max_new_tokens"),
    "too many new tokens": ("Query", query("s", 2**32 - 1), StatusCode.FAILED_PRECONDITION, None),
    "cold": (
        "Query",
        pb.QueryRequest(session_id="s", question=question(sampling=pb.Sampling(temperature=-1))),
        WRONG,
        "question.sampling.temperature",
    ),
    "no temperature": (
        "Query",
        pb.QueryRequest(
            session_id="s", question=question(sampling=pb.Sampling(temperature=float("nan")))
        ),
        WRONG,
        "question.sampling.temperature",
    ),
    "empty stop text": ("Query", query("s", stop=[""]), WRONG, "stop"),
    "too many logprobs": ("Query", query("s", top_logprobs=1000), WRONG, "top_logprobs"),
    "empty choice": (
        "Query",
        pb.QueryRequest(session_id="s", question=question(choices=[tokens([])])),
        WRONG,
        "question.choices",
    ),
    "too many choices": (
        "Query",
        pb.QueryRequest(session_id="s", question=question(choices=[tokens([1])] * 1025)),
        WRONG,
        "question.choices",
    ),
    "too many end tokens": (
        "Query",
        pb.QueryRequest(session_id="s", question=question(eos_ids=[1] * 1000)),
        WRONG,
        "question.eos_ids",
    ),
    "too many stop texts": ("Query", query("s", stop=["a"] * 65), WRONG, "stop"),
    "choices to commit": (
        "Query",
        pb.QueryRequest(session_id="s", commit=True, question=question(choices=[tokens([1])])),
        WRONG,
        "question.choices",
    ),
    "certainty": (
        "Register",
        pb.RegisterRequest(session_id="s", question=question(), risk=0),
        WRONG,
        "risk",
    ),
    "nothing to register": (
        "Register",
        pb.RegisterRequest(session_id="s", question=pb.Question(max_new_tokens=1)),
        WRONG,
        "question.prompt",
    ),
    "no new tokens to register": (
        "Register",
        pb.RegisterRequest(session_id="s", question=question(0)),
        WRONG,
        "question.max_new_tokens",
    ),
    "foreign end token to register": (
        "Register",
        pb.RegisterRequest(session_id="s", question=question(eos_ids=[99999])),
        WRONG,
        "question.sampling.logit_bias",
    ),
    "empty choice to register": (
        "Register",
        pb.RegisterRequest(session_id="s", question=question(choices=[tokens([])])),
        WRONG,
        "question.choices",
    ),
    "too many new tokens to register": (
        "Register",
        pb.RegisterRequest(session_id="s", question=question(2**32 - 1)),
        StatusCode.FAILED_PRECONDITION,
        None,
    ),
    "endless question to register": (
        "Register",
        pb.RegisterRequest(
            session_id="s", question=pb.Question(prompt=tokens([7] * 200_000), max_new_tokens=1)
        ),
        StatusCode.FAILED_PRECONDITION,
        None,
    ),
    "header without tokens": (
        "Declare",
        pb.DeclareRequest(session_id="s"),
        WRONG,
        "header.prompt",
    ),
    "foreign end token of a header": (
        "Declare",
        pb.DeclareRequest(session_id="s", header=pb.Header(prompt=tokens([1]), eos_ids=[99999])),
        WRONG,
        "header.eos_ids",
    ),
    "foreign slot of a header": (
        "Advance",
        pb.AdvanceRequest(session_id="s", header=pb.Header(prompt=tokens([1]), slot_ids=[99999])),
        WRONG,
        "header.slot_ids",
    ),
    "endless header": (
        "Declare",
        pb.DeclareRequest(
            session_id="s", header=pb.Header(prompt=tokens([1]), max_new_tokens=2**32 - 1)
        ),
        StatusCode.FAILED_PRECONDITION,
        None,
    ),
    "choices without a session": (
        "Generate",
        pb.GenerateRequest(question=question(choices=[tokens([1])])),
        WRONG,
        "question.choices",
    ),
    "no gap": (
        "Advance",
        pb.AdvanceRequest(
            session_id="s", header=pb.Header(prompt=tokens([1]), min_gap=float("nan"))
        ),
        WRONG,
        "header.min_gap",
    ),
    "foreign cursor": (
        "WatchAnswers",
        pb.WatchAnswersRequest(session_id="s", cursor="0a1b2c3d.0"),
        StatusCode.OUT_OF_RANGE,
        None,
    ),
    "tools that are none": (
        "RenderTemplate",
        pb.RenderTemplateRequest(chat=pb.Chat(messages=[pb.Message(role="user")], tools_json="{")),
        WRONG,
        "chat.tools_json",
    ),
    "message without role": (
        "RenderTemplate",
        pb.RenderTemplateRequest(chat=pb.Chat(messages=[pb.Message()])),
        WRONG,
        "chat.messages[0].role",
    ),
    "ids without text": ("Detokenize", pb.DetokenizeRequest(token_ids=[2**31]), WRONG, "token_ids"),
}
