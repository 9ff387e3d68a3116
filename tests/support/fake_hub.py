"""A local hub of data sets and models, for `HF_ENDPOINT`; answers what its clients ask."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import AbstractContextManager

from local_server import Handler, serving

COMMIT = "a" * 40


def _handler(name: str, files: dict[str, bytes]) -> type[Handler]:

    class Hosted(Handler):
        def do_GET(self) -> None:
            path, headers = self.path.partition("?")[0], {"X-Error-Code": "EntryNotFound"}
            body = None
            if found := re.fullmatch(rf"(?:/datasets)?/{name}/resolve/(?:main|v1|{COMMIT})/(.*)", path):
                if (body := files.get(found[1])) is not None:
                    headers = {"ETag": f'"{hashlib.md5(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
            elif re.fullmatch(rf"/api/(?:datasets|models)/{name}(/revision/(main|v1|{COMMIT}))?", path):
                about = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
                body = json.dumps(about).encode()
            elif found := re.fullmatch(rf"/api/(?:datasets|models)/{name}/tree/[^/]+/?(.*)", path):
                listed = [file for file in files if file.startswith(found[1])]
                each = [{"type": "file", "path": file, "size": len(files[file]), "oid": COMMIT} for file in listed]
                body = json.dumps(each).encode()
            elif path.startswith(("/api/", f"/datasets/{name}/resolve/")):
                there = f"/datasets/{name}/" in path
                headers = {"X-Error-Code": "RevisionNotFound" if there else "RepoNotFound"}
            self.answer(body or b"", 404 if body is None else 200, headers)

        do_HEAD = do_GET

    return Hosted


def hub(name: str, files: dict[str, bytes]) -> AbstractContextManager[str]:
    """Serve one data set; gives the hub's address."""
    return serving(_handler(name, files))
