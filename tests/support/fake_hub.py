"""A local hub of data sets and models, for `HF_ENDPOINT` and `MODELSCOPE_ENDPOINT`; answers what their clients ask."""

from __future__ import annotations

import hashlib
import json
import re
import urllib.parse
from contextlib import AbstractContextManager

from local_server import Handler, serving

COMMIT = "a" * 40


def _handler(name: str, files: dict[str, bytes]) -> type[Handler]:
    def of_modelscope(path: str, query: dict[str, list[str]]) -> bytes | None:
        """ModelScope's answer to a request for the list of files, or for one file."""
        if path in (f"/api/v1/datasets/{name}/repo/tree", f"/api/v1/models/{name}/repo/files"):
            listed = [{"Path": file, "Type": "blob", "Size": len(body)} for file, body in files.items()]
            return json.dumps({"Code": 200, "Success": True, "Data": {"Files": listed}}).encode()
        of_file = re.fullmatch(f"/api/v1/(datasets|models)/{name}/repo", path)
        return files.get(query["FilePath"][0]) if of_file else None

    class Hosted(Handler):
        def do_GET(self) -> None:
            (path, _, query), headers = self.path.partition("?"), {"X-Error-Code": "EntryNotFound"}
            body = None
            if path.startswith("/api/v1/"):
                body = of_modelscope(path, urllib.parse.parse_qs(query))
            elif found := re.fullmatch(rf"(?:/datasets)?/{name}/resolve/(?:main|v1|{COMMIT})/(.*)", path):
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
