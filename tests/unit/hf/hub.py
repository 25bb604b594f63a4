"""A hub of models on this machine, which may answer as the real one does at worst."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHA = "0123456789abcdef0123456789abcdef01234567"
CODES = {"GatedRepo": 401, "RepoNotFound": 404}


@contextmanager
def hub(folder: Path, *, refuses: str = "", cuts: str = "") -> Iterator[str]:
    """Serves the files of a folder as the model some/model; gives the address.

    Args:
        refuses: the code of the error that each request gets; see `CODES`.
        cuts: the beginning of the name of files that end before their last byte.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(has_body=False)

        def do_GET(self) -> None:
            self.answer(has_body=True)

        def answer(self, *, has_body: bool) -> None:
            if refuses:
                self.reply(CODES[refuses], b"", {"X-Error-Code": refuses})
                return
            files = sorted(folder.glob("*.*"))
            path = folder / self.path.rpartition("/")[2]
            if "/tree/" in self.path:
                found = [
                    {
                        "type": "file",
                        "path": p.name,
                        "size": p.stat().st_size,
                        "oid": "",
                    }
                    for p in files
                ]
                self.reply(200, json.dumps(found).encode(), {})
            elif self.path.startswith("/api/models/"):
                siblings = [{"rfilename": p.name} for p in files]
                about = {"id": "some/model", "sha": SHA, "siblings": siblings}
                self.reply(200, json.dumps(about).encode(), {})
            elif path not in files:
                self.reply(404, b"", {})
            else:
                content = path.read_bytes()
                head = {"ETag": f'"{path.name}"', "X-Repo-Commit": SHA}
                head["Content-Length"] = str(len(content))
                if cuts and path.name.startswith(cuts):
                    content = content[:-1]
                    self.close_connection = True
                self.reply(200, content if has_body else b"", head)

        def reply(self, code: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
