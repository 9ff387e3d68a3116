"""A local hub with the part of the HTTP interface that creating a repository and uploading to it need."""

from __future__ import annotations

import base64
import contextlib
import json

from local_server import Handler, serving


class Hub:
    """What was asked of the hub and uploaded to it.

    Attributes:
        repos: a repository's name to whether it is private.
        files: an uploaded file's name to its content.
        messages: the commit messages.
        tokens: the Authorization headers of all requests.
        status: if set, the HTTP status of an error with which every request is answered.
    """

    def __init__(self) -> None:
        self.repos: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.tokens: set[str | None] = set()
        self.status = 0


@contextlib.contextmanager
def running():
    """While inside, a hub runs; gives the hub and its address for HF_ENDPOINT."""
    hub = Hub()

    class Hosted(Handler):
        def do_GET(self):
            hub.tokens.add(self.headers["Authorization"])
            if hub.status:
                return self.answer({"error": "no"}, hub.status)
            name = self.path.removeprefix("/api/models/").partition("?")[0].partition("/revision")[0]
            if name not in hub.repos:
                return self.answer({"error": "Repository not found"}, 404)
            return self.answer({"id": name, "private": hub.repos[name], "sha": "0" * 40, "siblings": [], "tags": []})

        def do_POST(self):
            body = self.body()
            hub.tokens.add(self.headers["Authorization"])
            path = self.path.partition("?")[0]
            if hub.status:
                return self.answer({"error": "no"}, hub.status)
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
                url = f"http://{self.headers['Host']}/{name}"
                if name in hub.repos:
                    return self.answer({"error": "You already created this model repo", "url": url}, 409)
                hub.repos[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
                return self.answer({"url": url, "name": name})
            if path == "/api/validate-yaml":
                return self.answer({"errors": [], "warnings": []})
            if "/preupload/" in path:
                modes = [{"uploadMode": "regular", "shouldIgnore": False} for _ in json.loads(body)["files"]]
                names = [file["path"] for file in json.loads(body)["files"]]
                return self.answer({"files": [{"path": n, **mode} for n, mode in zip(names, modes, strict=True)]})
            if "/commit/" in path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "header":
                        hub.messages.append(line["value"]["summary"])
                    else:
                        hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                repo, oid = "/".join(path.split("/")[3:5]), "1" * 40
                commit = f"http://{self.headers['Host']}/{repo}/commit/{oid}"
                return self.answer({"commitUrl": commit, "commitOid": oid})
            return self.answer({"error": f"not spoken here: {path}"}, 501)

    with serving(Hosted) as address:
        yield hub, address
