"""Forged archives with right digests are refused with a sentence, or replayed to a certificate that can be read."""

import copy
import json
import os
import random
import shutil

import pytest

from bitproof.harness.errors import RecordingError
from bitproof.harness.powers.moved.certificate_text import lines_of, markdown_of
from bitproof.harness.powers.moved.environments import Environment, answer_or_refusal
from bitproof.harness.powers.moved.records import read_certificate, write_certificate
from bitproof.harness.powers.moved.standalone import answer_request, call_values
from bitproof.harness.powers.moved.standalone.call_archive import ValuesFile, read_json, write_json
from bitproof.harness.powers.moved.two_environments import TwoEnvironments

TEXTS = ("\x1b[2J\x1b]0;owned\x07", "a\nb\r\n# Heading", "`|*<script>", "\u202e\u2028", "\ud800", "x" * 100_000, "")
"""Texts that would clear a terminal, end a line or a cell, turn the reading direction, or are no Unicode."""
VALUES = (*TEXTS, None, True, -1, 0, 1 << 63, 1 << 400, -0.5, 1e308, float("nan"), [], {}, [[]], {"a": []}, {"": None})


class Here(Environment):
    """This process, as the new environment."""

    def ask(self, what, request, seconds):
        asked = {name: value for name, value in request.items() if name != "memory"}
        return answer_or_refusal(json.loads(json.dumps(answer_request.answered(what, asked))))


def replayed(folder, tmp_path):
    """Whether an archive is accepted. Its certificate can be printed, and read back as it was written."""
    comparison = TwoEnvironments(old=Here(), new=Here(), folder=folder, budget=0, memory=1 << 30, seconds=60)
    try:
        certificate = comparison.replay(control=False)
    except RecordingError as error:
        assert "the archive of calls is refused; nothing in it was run" in str(error)
        return False
    path = tmp_path / "certificate.json"
    write_certificate(path, certificate)
    assert read_certificate(path) == certificate
    text = "\n".join([*lines_of(certificate), markdown_of(certificate)])
    assert not any(c in text for c in "\x1b\x07\r\u202e\u2028") and "\n# Heading" not in text
    text.encode()
    return True


@pytest.fixture
def forged(archive_folder, tmp_path):
    """Writes a copy of the archive with a change, and with digests that fit."""
    folder = shutil.copytree(archive_folder, tmp_path / "forged")
    head = read_json(str(folder / "calls.json"))
    head["calls"] = head["calls"][:12]

    def write(change):
        made = copy.deepcopy(head)
        change(made)
        write_json(str(folder / "calls.json"), made)
        return folder

    return write


def places_in(value, path=()):
    """The path of every value in nested lists and objects."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places_in(item, (*path, key))


def put(value, path, other):
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = other


def test_any_value_of_the_head_may_be_anything(forged, tmp_path):
    count = 0
    for name in ("environment", "program", "steps", "uncollected", "arguments", "log", "records", "format"):
        for value in VALUES:
            replayed(forged(lambda head, name=name, value=value: head.update({name: value})), tmp_path)
            count += 1
    for name in ("environment", "uncollected"):
        for value in VALUES:
            replayed(forged(lambda head, name=name, value=value: head[name].update(torch=value)), tmp_path)
            replayed(forged(lambda head, n=name, v=value: head[n].update({str(v): 1})), tmp_path)
            count += 2
    assert count == 12 * len(VALUES)


def test_any_value_at_any_depth_of_a_call_may_be_anything(forged, tmp_path):
    draw = random.Random(5)
    for _ in range(250):

        def change(head):
            call = draw.choice(head["calls"])
            head["calls"] = [call]
            place = draw.choice([path for path in places_in(call) if path])
            put(call, place, draw.choice(VALUES))

        replayed(forged(change), tmp_path)


def test_any_field_at_any_depth_of_a_call_may_be_missing(forged, tmp_path):
    draw = random.Random(8)
    for _ in range(120):

        def change(head):
            call = draw.choice(head["calls"])
            head["calls"] = [call]
            *path, last = draw.choice([path for path in places_in(call) if path])
            for key in path:
                call = call[key]
            del call[last]

        replayed(forged(change), tmp_path)


def test_a_call_may_have_the_arguments_of_another(forged, tmp_path):
    """Operators, tensors, storages and results of two calls are mixed: kernels get what they were not made for."""
    draw = random.Random(6)
    for _ in range(120):

        def change(head):
            one, other = draw.sample(head["calls"], 2)
            fields = draw.sample(("op", "args", "kwargs", "storages", "tensors", "results", "settings", "state"), 3)
            head["calls"] = [one | {name: other[name] for name in fields}]

        replayed(forged(change), tmp_path)


def test_tensors_may_overlap_themselves_and_each_other(forged, tmp_path):
    draw = random.Random(7)
    for _ in range(60):

        def change(head):
            call = draw.choice([call for call in head["calls"] if call["tensors"]])
            head["calls"] = [call]
            for tensor in call["tensors"]:
                tensor["stride"] = [draw.choice((0, 1, each, 2 * each)) for each in tensor["stride"]]
                tensor["storage"] = draw.randrange(len(call["storages"]))

        replayed(forged(change), tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"null", b"\xff\xfe{}", b"{" * 5000, b"[" * 200_000, b'{"digest": 1}', b'{"digest": "x"}'),
        *(b"1" * 10_000, b'{"a": ' + b"9" * 5000 + b"}", '{"digest": "\u00e9"}'.encode("utf-16"), b"\x00" * 4096),
        *(b'{"digest": "a", "digest": "b"}', b'{"digest": "\\ud800", "x": NaN}', b"\x80\x02}q\x00."),
    ],
)
def test_a_file_that_is_not_an_archive_is_refused(forged, tmp_path, content):
    folder = forged(lambda head: None)
    (folder / "calls.json").write_bytes(content)
    assert not replayed(folder, tmp_path)


@pytest.mark.parametrize("name", ["calls.json", "values.bin"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "missing", "loop", "unreadable"])
def test_a_file_of_another_kind_is_refused_at_once(forged, tmp_path, name, kind):
    """A named pipe without a writer would be read forever."""
    path = forged(lambda head: None) / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "unreadable":
        path.symlink_to("/proc/self/mem")
    assert not replayed(path.parent, tmp_path)


def test_blocks_may_share_bytes_but_not_lie_about_them(archive_folder, forged, tmp_path):
    def one_for_all(head):
        storages = [storage for call in head["calls"] for storage in call["storages"]]
        for storage in storages:
            storage["block"] = storages[0]["block"]

    replayed(forged(one_for_all), tmp_path)
    folder = forged(lambda head: None)
    values = ValuesFile(str(folder / "values.bin"), 1 << 20)  # other bytes of the same size
    values.put(b"\x01" * os.path.getsize(archive_folder / "values.bin"))
    values.file.close()
    states = {row["state"] for row in answer_request.answered("replay", {"folder": str(folder)})["rows"].values()}
    assert "not replayed" in states and "moved" not in states
    assert call_values.short_digest(b"\x01") != call_values.short_digest(b"\x01" * 2)
