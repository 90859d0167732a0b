"""The live page in a real browser: what a person sees of a running server."""

from __future__ import annotations

import browser
import pytest
import served
from grpc_service import text, tokens

from jaxstate.serving import jaxstate_pb2 as pb

pytestmark = pytest.mark.long

HOSTILE = "<img src=x onerror=\"document.title='hacked'\"> & 'up' or \"down\"?\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def serving(directory):
    model = served.write_model(directory)
    arguments = ("--max-model-len", 100, "--cache-dir", directory)
    with served.ready(directory / "log", model, *arguments) as serving:
        yield serving


def _text(page):
    return page.evaluate("document.body.innerText")


def test_a_person_sees_sessions_answers_and_their_age(directory, serving, tmp_path):
    with serving.connected() as (_, stub), browser.opened(tmp_path / "profile") as page:
        names = ("eurusd:1h", "btc:1m")
        for seed, name in enumerate(names):
            prefix = tokens(range(20, 60 + seed))
            stub.CreateSession(pb.CreateSessionRequest(session_id=name, prefix=prefix))
            for asked in (HOSTILE, "Is the last one the highest?"):
                question = pb.Question(
                    prompt=text(asked), choices=[text("yes"), text(" no")] if seed else []
                )
                question.max_new_tokens = 3
                stub.Register(pb.RegisterRequest(session_id=name, question=question))
        page.show(f"http://127.0.0.1:{serving.page_port}/")
        page.wait_for("document.body.innerText.match(/current/g)?.length == 4")
        shown = _text(page)
        assert "tiny" in shown and "ready" in shown and "2 sessions" in shown
        for name in (*names, "40 tokens", "41 tokens", "version 0", "no lag", "computed"):
            assert name in shown, shown
        # What clients send is text, whatever it looks like.
        assert HOSTILE.strip() in shown and page.evaluate("document.title") == "jaxstate"
        assert page.evaluate("document.images.length") == 0
        light = page.screenshot(directory / "light.png")

        untouched = page.evaluate("document.querySelectorAll('section')[0].mark = 1")
        stub.Append(pb.AppendRequest(session_id="eurusd:1h", prompt=tokens([30, 31])))
        page.wait_for("document.body.innerText.includes('42 tokens')")
        page.wait_for("document.body.innerText.match(/current/g)?.length == 4")
        assert "version 1" in _text(page) and untouched == 1
        # Sessions stand in the order of their ids, and what did not change is not made anew.
        heads = "[...document.querySelectorAll('h2')].map((head) => head.textContent)"
        assert page.evaluate(heads) == sorted(names)
        assert page.evaluate("document.querySelectorAll('section')[0].mark") == 1

        page.scheme("dark")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == "rgb(20, 23, 26)"
        dark = page.screenshot(directory / "dark.png")
        assert light != dark and min(len(light), len(dark)) > 10_000

        page.show(f"http://127.0.0.1:{serving.page_port}/", width=380, height=800)
        page.wait_for("document.body.innerText.match(/current/g)?.length == 4")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.screenshot(directory / "narrow.png")
        for name in names:
            stub.CloseSession(pb.CloseSessionRequest(session_id=name))
        page.wait_for("document.body.innerText.includes('0 sessions')")
        assert not page.evaluate("document.querySelectorAll('section').length")
        assert not [one for one in page.problems if "favicon" not in str(one)], page.problems
