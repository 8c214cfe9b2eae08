"""The HTTPS API of the cluster, as far as kubectl and broker need it, with faults on request."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.clouds.kubernetes.cluster import ApiError, Cluster, Json
from tests.clouds.kubernetes.remote_command import run_remote_command

TOKEN = "test-token"
VERBS = ["create", "delete", "get", "list", "patch"]
RESOURCES = [("pods", "Pod", True), ("nodes", "Node", False), ("pods/exec", "PodExecOptions", True)]
ACCESS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiServer:
    """Serve a cluster from a thread of its own. Faults are attributes, read at each request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster(folder)
        self.is_logged_out = False
        self.is_answer_lost = False  # of the next create, which is carried out
        self.is_throttled = False  # the next create
        self.errors: list[tuple[str, int, str]] = []  # of the next requests: part of the path, code, reason
        self.denied: set[tuple[str, str]] = set()  # (namespace, resource); all namespaces: ""
        self.requests: list[str] = []
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        make_certificate(folder)
        self._runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        self.kubeconfig = self._write_kubeconfig()

    def close(self) -> None:
        """Stop serving, and end all pods."""
        self.cluster.close()
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _start(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._answer_errors])
        app.router.add_get("/version", self._get_version)
        app.router.add_get("/api", self._list_versions)
        app.router.add_get("/apis", self._list_groups)
        app.router.add_get("/api/v1", self._list_resources)
        app.router.add_post(ACCESS, self._review_access)
        app.router.add_get("/api/v1/nodes", self._list_nodes)
        app.router.add_get("/api/v1/pods", self._list_pods)
        base = "/api/v1/namespaces/{namespace}/pods"
        app.router.add_get(base, self._list_pods)
        app.router.add_post(base, self._create_pod)
        app.router.add_get(base + "/{name}", self._get_pod)
        app.router.add_delete(base + "/{name}", self._delete_pod)
        app.router.add_patch(base + "/{name}", self._patch_pod)
        app.router.add_route("*", base + "/{name}/exec", self._exec)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "server.crt", self.folder / "server.key")
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    def _write_kubeconfig(self) -> Path:
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "c", "cluster": {
                "server": f"https://127.0.0.1:{self.port}", "certificate-authority": str(self.folder / "server.crt"),
            }}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
        }  # fmt: skip
        path = self.folder / "kubeconfig"
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return path

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path_qs}")
        try:
            self._admit(request)
            return await handler(request)
        except ApiError as error:
            return make_status_response(error)

    def _admit(self, request: web.Request) -> None:
        if self.is_logged_out or request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise ApiError(401, "Unauthorized", "Unauthorized")
        if self.errors and self.errors[0][0] in f"{request.method} {request.path}":
            _, code, reason = self.errors.pop(0)
            raise ApiError(code, reason, f"injected: {reason}")
        parts = request.path.split("/")
        namespace = parts[4] if "namespaces" in parts else ""
        resource = "nodes" if request.path.endswith("/nodes") else "pods"
        if request.path.startswith("/api/v1/") and (namespace, resource) in self.denied:
            where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
            raise ApiError(403, "Forbidden", f'{resource} is forbidden: User "test" cannot access "{resource}"{where}')

    async def _get_version(self, request: web.Request) -> web.Response:
        """Answer Debian's kubectl, which chooses its program by the server's version."""
        return web.json_response({"major": "1", "minor": "32", "gitVersion": "v1.32.0"})

    async def _list_versions(self, request: web.Request) -> web.Response:
        return web.json_response({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})

    async def _list_groups(self, request: web.Request) -> web.Response:
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})

    async def _list_resources(self, request: web.Request) -> web.Response:
        found = [
            {"name": name, "singularName": "", "namespaced": is_namespaced, "kind": kind, "verbs": VERBS}
            for name, kind, is_namespaced in RESOURCES
        ]
        return web.json_response({"kind": "APIResourceList", "groupVersion": "v1", "resources": found})

    async def _review_access(self, request: web.Request) -> web.Response:
        review = json.loads(await request.read())
        asked = review["spec"]["resourceAttributes"]
        is_allowed = (asked.get("namespace", ""), asked["resource"]) not in self.denied
        return web.json_response({**review, "status": {"allowed": is_allowed}}, status=201)

    async def _list_nodes(self, request: web.Request) -> web.Response:
        return make_list_response("NodeList", list(self.cluster.nodes.values()))

    async def _list_pods(self, request: web.Request) -> web.Response:
        wanted = [each.partition("=") for each in request.query.get("labelSelector", "").split(",") if each]

        def selects(pod: Json) -> bool:
            labels = pod["metadata"].get("labels", {})
            return all(labels.get(key) == value for key, _, value in wanted)

        return make_list_response("PodList", self.cluster.list(request.match_info.get("namespace"), selects))

    async def _create_pod(self, request: web.Request) -> web.Response:
        if self.is_throttled:
            self.is_throttled = False
            raise ApiError(429, "TooManyRequests", "too many requests, please try again later")
        pod = self.cluster.create(request.match_info["namespace"], json.loads(await request.read()))
        if self.is_answer_lost:
            self.is_answer_lost = False
            assert request.transport
            request.transport.abort()
        return web.json_response(pod, status=201)

    async def _get_pod(self, request: web.Request) -> web.Response:
        return web.json_response(self.cluster.get(request.match_info["namespace"], request.match_info["name"]))

    async def _delete_pod(self, request: web.Request) -> web.Response:
        body = await request.read()
        given = (json.loads(body) if body else {}) | dict(request.query)
        grace_s = float(given["gracePeriodSeconds"]) if "gracePeriodSeconds" in given else None
        place = request.match_info["namespace"], request.match_info["name"]
        return web.json_response(await asyncio.to_thread(lambda: self.cluster.delete(*place, grace_s=grace_s)))

    async def _patch_pod(self, request: web.Request) -> web.Response:
        removed = json.loads(await request.read())["metadata"]["$deleteFromPrimitiveList/finalizers"]
        place = request.match_info["namespace"], request.match_info["name"]
        return web.json_response(self.cluster.patch_finalizers(*place, removed))

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = self.cluster.get(request.match_info["namespace"], request.match_info["name"])
        if pod["status"]["phase"] != "Running":
            raise ApiError(400, "BadRequest", f"container not found ({request.query.get('container')})")
        environment = self.cluster.make_environment(pod)
        return await run_remote_command(request, request.query.getall("command"), environment)


def make_list_response(kind: str, items: list[Json]) -> web.Response:
    return web.json_response({"apiVersion": "v1", "kind": kind, "metadata": {"resourceVersion": "1"}, "items": items})


def make_status_response(error: ApiError) -> web.Response:
    """Return the Status object that the API server answers with."""
    status: dict[str, Any] = {
        "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure", "message": error.message,
        "reason": error.reason, "code": error.code,
    }  # fmt: skip
    return web.json_response(status, status=error.code)


def make_certificate(folder: Path) -> None:
    """Make a certificate for 127.0.0.1 that signs itself."""
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", folder / "server.key", "-out", folder / "server.crt", "-days", "2", "-subj", "/CN=127.0.0.1",
            "-addext", "subjectAltName=IP:127.0.0.1",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
