"""A local hub with the part of the HTTP interface that creating a repository and uploading to it need."""

from __future__ import annotations

import base64
import contextlib
import json
from types import SimpleNamespace

from local_server import Handler, serving


@contextlib.contextmanager
def running():
    """While inside, a hub runs; gives it and its address for HF_ENDPOINT.

    It notes whether each of `repos` is private, the `files` uploaded by name, the commits' `messages` and all
    Authorization headers (`tokens`). If `status` is set, it answers every request with this error.
    """
    hub = SimpleNamespace(repos={}, files={}, messages=[], tokens=set(), status=0)

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
                usual = {"uploadMode": "regular", "shouldIgnore": False}
                return self.answer({"files": [{"path": f["path"], **usual} for f in json.loads(body)["files"]]})
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
