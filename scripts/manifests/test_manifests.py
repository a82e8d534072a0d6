"""The chart in deploy/helm/agl and `agl manifests`: they say the same, a real API server takes both, and the controller's rights are the least.

    python test_manifests.py AGL        AGL is the binary; AGL_TEST_KUBECONFIG names the API server, without it those tests skip
"""

import itertools
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request
from pathlib import Path

import helm_python as helm
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = str(ROOT / "deploy/helm/agl")
AGL = str(Path(sys.argv.pop()).resolve())

# Values of the chart beside what `agl manifests` is to be given for the same.
VARIANTS = {
    "defaults": ({}, []),
    "Postgres": (
        {"gateway": {"replicas": 3, "postgres": {"existingSecret": "agl-db", "key": "url"}}},
        ["--replicas=3", "--postgres-secret=agl-db", "--postgres-key=url"],
    ),
    "DNS and a trainer elsewhere": (
        {"networkPolicy": {"allowDns": True, "gatewayFromNamespaces": ["training", "monitoring"]}},
        ["--allow-dns", "--gateway-from=training", "--gateway-from=monitoring"],
    ),
    "one namespace": ({"rollouts": {"namespace": "agl"}}, ["--rollouts-namespace=agl"]),
    "everything else": (
        {
            "image": {"repository": "registry.example:5000/agl", "tag": "1.2"},
            "rollouts": {"namespace": "elsewhere"},
            "controller": {"replicas": 1, "agentUrl": "https://agl.example"},
            "gateway": {"shutdownGraceSeconds": 90, "persistence": {"size": "1Ti", "storageClass": "fast"}},
        },
        [
            "--image=registry.example:5000/agl:1.2", "--rollouts-namespace=elsewhere", "--controller-replicas=1",
            "--agent-url=https://agl.example", "--shutdown-grace=90", "--storage=1Ti", "--storage-class=fast",
        ],
    ),
}

RUN_FILE = """\
# Ünïcode, "quotes", 'both', a tab:\t| and > and : # - ? [ ] { } & * ! % @ `

model.name = "policy"
gateway.limits.max_inflight_calls = 7
   # indented, and a blank behind it: \n
"""


class Strict(yaml.SafeLoader):
    """Refuses a key that stands twice."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice} stand twice", node.start_mark)
        return super().construct_mapping(node, deep)


def documents(text):
    return [document for document in yaml.load_all(text, Strict) if document]


def chart_objects(values, config=None):
    with helm.Chart.load(CHART) as chart:
        rendered = (config or chart).render(*([chart] if config else []), values, name="agl", namespace="agl")
    return [each for path, text in rendered.items() if not path.endswith("NOTES.txt") for each in documents(text)]


def agl_manifests(*arguments):
    run = subprocess.run([AGL, "manifests", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        raise AssertionError(f"agl manifests {' '.join(arguments)}: {run.stderr}")
    return documents(run.stdout)


def identity(thing):
    return f"{thing['kind']} {thing['metadata'].get('namespace', '')}/{thing['metadata']['name']}"


def compared(objects):
    """By name, without what only Helm writes."""
    for each in objects:
        metadata = each["metadata"]
        for field, keys in {"labels": ["app.kubernetes.io/managed-by", "helm.sh/chart"], "annotations": ["helm.sh/resource-policy"]}.items():
            for key in keys:
                metadata.get(field, {}).pop(key, None)
            if not metadata.get(field, True):
                del metadata[field]
    return {identity(each): each for each in objects}


def dropped(sent, kept, place=""):
    """Where what was sent is not what was kept: a server drops fields that it does not know without a word."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        return [lost for key, value in sent.items() if value or key in kept for lost in dropped(value, kept.get(key), f"{place}.{key}")]
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        return [lost for index, pair in enumerate(zip(sent, kept)) for lost in dropped(*pair, f"{place}[{index}]")]
    return [] if sent == kept else [f"{place}: {sent!r} became {kept!r}"]


class TheChart(unittest.TestCase):
    maxDiff = None

    def test_helm_finds_nothing_wrong_with_it(self):
        report = helm.lint(CHART, strict=True)
        wrong = [message for message in report["messages"] if message["severity"] >= 2]
        self.assertEqual((wrong, report["errors"]), ([], []))

    def test_says_the_same_as_agl_manifests(self):
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(RUN_FILE)
            file.flush()
            for name, (values, arguments) in VARIANTS.items():
                for run_file in [False, True]:
                    with self.subTest(name, run_file=run_file):
                        # The key's Secret is in the chart alone, the release's namespace in `agl manifests` alone.
                        values["serverKey"] = {"existingSecret": "agl-server-key"}
                        values["runFile"] = RUN_FILE if run_file else ""
                        ours = compared(agl_manifests(*arguments, *([file.name] if run_file else [])))
                        ours.pop("Namespace /agl")
                        self.assertEqual(compared(chart_objects(values)), ours)

    def test_the_policies_alone_are_those_among_all(self):
        alone = agl_manifests("--network-policy-only")
        self.assertEqual(alone, [each for each in agl_manifests() if each["kind"] == "NetworkPolicy"])
        self.assertEqual(len(alone), 2)

    def test_without_policies_there_is_none(self):
        kinds = {each["kind"] for each in chart_objects({"networkPolicy": {"enabled": False}})}
        self.assertNotIn("NetworkPolicy", kinds)

    def test_what_is_there_already_is_used_and_not_made(self):
        objects = chart_objects({
            "serverKey": {"existingSecret": "my-key"},
            "gateway": {"persistence": {"existingClaim": "my-disk"}},
            "rollouts": {"createNamespace": False},
        })
        made = {each["kind"] for each in objects}
        self.assertFalse(made & {"Secret", "PersistentVolumeClaim", "Namespace"}, made)
        for deployment in (each for each in objects if each["kind"] == "Deployment"):
            pod = json.dumps(deployment["spec"]["template"]["spec"])
            self.assertIn('"my-key"', pod)
            self.assertEqual('"my-disk"' in pod, deployment["metadata"]["name"] == "agl-gateway")

    def test_a_release_of_another_name_keeps_its_objects_apart(self):
        with helm.Chart.load(CHART) as chart:
            rendered = chart.render({"rollouts": {"createNamespace": False}}, name="second", namespace="b")
        text = "".join(rendered.values())
        self.assertIn("--set=controller.kubernetes.lease_name=second-agl-controller", text)
        self.assertIn("http://$(SECOND_AGL_GATEWAY_SERVICE_HOST):8080", text)
        names = {each["metadata"]["name"] for path, part in rendered.items() if not path.endswith(".txt") for each in documents(part)}
        self.assertTrue(all(name.startswith("second-agl-") for name in names), names)

    def test_values_that_cannot_work_are_refused(self):
        for values, word in [
            ({"gateway": {"replicas": 2}}, "Postgres"),
            ({"gateway": {"replica": 2}}, "replica"),
            ({"rollouts": {"namespace": "Not A Name"}}, "namespace"),
            ({"rollouts": {"podSecurity": "none"}}, "podSecurity"),
            ({"networkPolicy": {"allowDns": "yes"}}, "allowDns"),
        ]:
            with self.subTest(values=values), self.assertRaises(helm.HelmError) as caught:
                chart_objects(values)
            self.assertIn(word, str(caught.exception))

    def test_every_pod_keeps_the_restricted_standard(self):
        for each in chart_objects({}):
            if each["kind"] != "Deployment":
                continue
            pod = each["spec"]["template"]["spec"]
            self.assertTrue(pod["securityContext"]["runAsNonRoot"])
            self.assertEqual(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault")
            for container in pod["containers"]:
                self.assertEqual(container["securityContext"]["capabilities"], {"drop": ["ALL"]})
                self.assertFalse(container["securityContext"]["allowPrivilegeEscalation"])
                self.assertTrue(container["securityContext"]["readOnlyRootFilesystem"])


class Component:
    """A component of the manifests as a process of this machine, with the command line and the environment of its Deployment. `places` says what
    stands here for what stands there."""

    def __init__(self, name, folder, places, environment=(), arguments=()):
        wanted = f"agl-{name}"
        deployment = next(each for each in agl_manifests(*arguments) if each["kind"] == "Deployment" and each["metadata"]["name"] == wanted)
        (self.container,) = deployment["spec"]["template"]["spec"]["containers"]
        command = self.container["args"]
        for there, here in places.items():
            command = [argument.replace(there, here) for argument in command]
        given = {each["name"]: each.get("value", "secret") for each in self.container["env"]}
        self.log = Path(folder, f"{name}.log")
        with self.log.open("w") as stderr:
            self.process = subprocess.Popen([AGL, *command], env={**os.environ, **given, **dict(environment)}, stderr=stderr)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        if status:
            raise AssertionError(f"it ended with {status}: {self.log.read_text()}")

    def wait_for(self, what):
        """Until `what()` is something, as long as the process runs."""
        while self.process.poll() is None:
            if found := what():
                return found
            time.sleep(0.05)
        raise AssertionError(f"it ended by itself: {self.log.read_text()}")


def gateway(folder):
    """A gateway as its Deployment says, and its address."""
    Path(folder, "run.toml").write_text(RUN_FILE)
    gateway = Component("gateway", folder, {"/etc/agl": folder, "/data": f"{folder}/data", "0.0.0.0:8080": "127.0.0.1:0"})
    lines = gateway.wait_for(lambda: [line for line in gateway.log.read_text().splitlines() if line.startswith("gateway on ")])
    return gateway, lines[0].split()[2].rstrip(",")


class TheGateway(unittest.TestCase):
    def test_starts_and_ends_as_its_deployment_says(self):
        with tempfile.TemporaryDirectory() as folder:
            process, address = gateway(folder)
            with process:
                for probe in ["startupProbe", "readinessProbe", "livenessProbe"]:
                    with urllib.request.urlopen(address + process.container[probe]["httpGet"]["path"], timeout=30) as answer:
                        self.assertEqual(answer.status, 200)
                with self.assertRaises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(address + "/proxy/state", timeout=30)
                refused.exception.close()
                self.assertEqual(refused.exception.code, 401)
                self.assertTrue(Path(folder, "data/gateway.db").exists())


class Api:
    """A Kubernetes API server, as whoever has the token."""

    def __init__(self, server, token):
        self.server, self.token = server, token
        self.context = ssl._create_unverified_context()
        self.kinds = {}

    @classmethod
    def from_kubeconfig(cls, path):
        config = yaml.safe_load(Path(path).read_text())
        return cls(config["clusters"][0]["cluster"]["server"], config["users"][0]["user"]["token"])

    def request(self, method, path, body=None, kind="application/json"):
        """The status and the answer; of a watch its first event, if there was one in time."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
        request = urllib.request.Request(self.server + path, data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, context=self.context, timeout=60) as answer:
                # Behind the first event of a watch others may follow.
                return answer.status, json.JSONDecoder().raw_decode(answer.read().decode() or "null")[0]
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode(errors="replace")

    def group(self, version):
        return f"/apis/{version}" if "/" in version else f"/api/{version}"

    def path(self, thing):
        group = self.group(thing["apiVersion"])
        if group not in self.kinds:
            self.kinds[group] = {each["kind"]: each for each in self.request("GET", group)[1]["resources"] if "/" not in each["name"]}
        kind, metadata = self.kinds[group][thing["kind"]], thing["metadata"]
        where = f"/namespaces/{metadata['namespace']}" if kind["namespaced"] else ""
        return f"{group}{where}/{kind['name']}/{metadata['name']}"

    def apply(self, thing):
        status, answer = self.request("PATCH", self.path(thing) + "?fieldManager=test&force=true", thing, "application/apply-patch+yaml")
        if status not in (200, 201):
            raise AssertionError(f"{identity(thing)}: {status} {answer}")
        return status, answer

    def get(self, thing):
        return self.request("GET", self.path(thing))


@unittest.skipUnless(os.environ.get("AGL_TEST_KUBECONFIG"), "no Kubernetes API server")
class ARealApiServer(unittest.TestCase):
    numbers = itertools.count()

    @classmethod
    def setUpClass(cls):
        cls.kubeconfig = os.environ["AGL_TEST_KUBECONFIG"]
        cls.api = Api.from_kubeconfig(cls.kubeconfig)

    def namespaces(self, *endings):
        """Names that no other run has used, of namespaces that end with the test."""
        # A namespace that is being deleted takes nothing new: no two tests have the same.
        names = [f"t{os.getpid()}-{next(self.numbers)}{ending}" for ending in endings]
        for name in names:
            self.addCleanup(self.api.request, "DELETE", f"/api/v1/namespaces/{name}")
        return names

    def applied(self):
        """Gateway and controller in the one, rollouts in the other."""
        here, there = self.namespaces("", "-agents")
        for each in agl_manifests(f"--namespace={here}", f"--rollouts-namespace={there}", "--kubernetes-version=1.20"):
            self.api.apply(each)
        return here, there

    def account(self, namespace, name):
        """The API server as that account sees it, with a token of its own."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        status, answer = self.api.request("POST", path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
        self.assertEqual(status, 201, answer)
        return Api(self.api.server, answer["status"]["token"])

    def test_takes_what_agl_manifests_prints_and_changes_nothing_the_second_time(self):
        for number, (name, (_, arguments)) in enumerate(VARIANTS.items()):
            with self.subTest(name):
                here, there = self.namespaces(f"-{number}", f"-{number}-agents")
                there = here if name == "one namespace" else there
                arguments = [argument for argument in arguments if "namespace" not in argument]
                objects = agl_manifests(
                    *arguments, f"--namespace={here}", f"--rollouts-namespace={there}", "--kubernetes-version=1.20"
                )
                first = [self.api.apply(each) for each in objects]
                self.assertEqual({status for status, _ in first}, {201})
                for each, (_, before) in zip(objects, first):
                    self.assertEqual(dropped(each, before), [], identity(each))
                    _, after = self.api.apply(each)
                    self.assertEqual(before["metadata"].get("generation"), after["metadata"].get("generation"), identity(each))

    def test_takes_the_chart_from_helm_and_its_upgrade_keeps_the_key_and_the_data(self):
        here, there = self.namespaces("", "-agents")
        self.addCleanup(self.api.request, "DELETE", self.service_monitors())
        values = {"rollouts": {"namespace": there}, "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}
        with helm.Config(kubeconfig_path=self.kubeconfig, namespace=here) as config:
            release = config.install(CHART, "agl", values, namespace=here, create_namespace=True)
            objects = documents(config.status("agl")["manifest"] if "manifest" not in release else release["manifest"])
            self.assertIn(f"ServiceMonitor {here}/agl-gateway", map(identity, objects))
            for each in objects:
                status, answer = self.api.get(each)
                self.assertEqual((status, dropped(each, answer)), (200, []), identity(each))
            secret = f"/api/v1/namespaces/{here}/secrets/agl-server-key"
            key = self.api.request("GET", secret)[1]["data"]["key"]
            values["gateway"] = {"shutdownGraceSeconds": 7}
            config.upgrade(CHART, "agl", values, namespace=here)
            self.assertEqual(self.api.request("GET", secret)[1]["data"]["key"], key)
            deployment = self.api.request("GET", f"/apis/apps/v1/namespaces/{here}/deployments/agl-gateway")[1]
            self.assertEqual(deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"], 27)
            config.uninstall("agl")
        kept = {identity(each) for each in objects if self.api.get(each)[0] == 200}
        self.assertEqual(kept, {f"PersistentVolumeClaim {here}/agl-gateway", f"Namespace /{there}"})

    def service_monitors(self):
        """Makes the kind known, as the Prometheus operator does."""
        definition = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {
                "name": "servicemonitors.monitoring.coreos.com",
                "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
            },
            "spec": {
                "group": "monitoring.coreos.com",
                "names": {"kind": "ServiceMonitor", "plural": "servicemonitors"},
                "scope": "Namespaced",
                "versions": [{
                    "name": "v1", "served": True, "storage": True,
                    "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                }],
            },
        }
        self.api.apply(definition)
        deadline = time.monotonic() + 60
        while self.api.request("GET", "/apis/monitoring.coreos.com/v1")[0] != 200 and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.api.path(definition)

    def test_gives_the_controller_its_rights_and_no_other(self):
        here, there = self.applied()
        controller, gateway = self.account(here, "agl-controller"), self.account(here, "agl-gateway")
        # What every account may, the gateway's may: it has no rights of its own.
        self.assertEqual(self.rights(controller, there) - self.rights(gateway, there), {
            *(("batch", "jobs", "", verb) for verb in ["create", "get", "list", "watch", "delete"]),
            *(("", "pods", "", verb) for verb in ["get", "list", "watch", "delete"]),
            ("", "pods/log", "", "get"),
            *(("", "secrets", "", verb) for verb in ["create", "get"]),
            ("coordination.k8s.io", "leases", "", "create"),
            *(("coordination.k8s.io", "leases", "agl-controller", verb) for verb in ["get", "update"]),
        })
        for elsewhere in [here, "default", "kube-system"]:
            self.assertEqual(self.rights(controller, elsewhere), self.rights(gateway, elsewhere))
        self.assertNotIn("*", {verb for *_, verb in self.rights(gateway, here)})

    def rights(self, api, namespace):
        """(group, resource, name or nothing, verb) that the account may in a namespace, the cluster's rights among them."""
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
        status, answer = api.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", review)
        self.assertEqual(status, 201, answer)
        self.assertFalse(answer["status"]["incomplete"], answer)
        return {
            (group, resource, name, verb)
            for rule in answer["status"]["resourceRules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for name in rule.get("resourceNames") or [""]
            for verb in rule["verbs"]
        }

    def test_lets_the_controller_do_its_work_and_refuses_the_rest(self):
        here, there = self.applied()
        controller = self.account(here, "agl-controller")
        agents, jobs = f"/api/v1/namespaces/{there}", f"/apis/batch/v1/namespaces/{there}/jobs"
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{there}/leases"
        container = {"name": "agent", "image": "agent", "command": ["true"]}
        job = {"metadata": {"name": "one"}, "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [container]}}}}
        status, made = controller.request("POST", jobs, job)
        self.assertEqual(status, 201, made)
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "one", "uid": made["metadata"]["uid"]}
        secret = {"metadata": {"name": "one", "ownerReferences": [owner]}, "stringData": {"key": "key"}}
        status, lease = controller.request("POST", leases, {"metadata": {"name": "agl-controller"}, "spec": {"holderIdentity": "a"}})
        self.assertEqual(status, 201, lease)
        for expected, method, path, *body in [
            (201, "POST", f"{agents}/secrets", secret), (200, "GET", f"{agents}/secrets/one"),
            (200, "GET", jobs), (200, "GET", f"{jobs}/one"), (200, "GET", f"{jobs}?watch=1&timeoutSeconds=1"),
            (200, "GET", f"{agents}/pods?labelSelector=agl%2Frole"), (404, "GET", f"{agents}/pods/none/log"),
            (200, "PUT", f"{leases}/agl-controller", lease),
            (404, "DELETE", f"{agents}/pods/none"),
            (403, "GET", f"{agents}/secrets"), (403, "DELETE", f"{agents}/secrets/one"), (403, "PATCH", f"{agents}/secrets/one", {}, "application/merge-patch+json"), (403, "GET", f"{leases}/another"),
            (403, "PATCH", f"{jobs}/one", {}, "application/merge-patch+json"),
            (403, "POST", f"{agents}/pods", {}), (403, "POST", f"{agents}/pods/one/exec"),
            (403, "DELETE", f"/apis/networking.k8s.io/v1/namespaces/{there}/networkpolicies/agl-rollouts"),
            (403, "POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{there}/rolebindings", {}),
            (403, "GET", "/api/v1/secrets"), (403, "GET", "/api/v1/pods"), (403, "GET", "/api/v1/nodes"), (403, "GET", "/api/v1/namespaces"),
            (403, "GET", "/apis/batch/v1/jobs"), (403, "GET", f"/apis/batch/v1/namespaces/{here}/jobs"),
            (403, "DELETE", "/api/v1/namespaces/default/pods/one"), (403, "GET", f"/api/v1/namespaces/{here}/secrets/agl-server-key"),
            (200, "DELETE", f"{jobs}/one"),
        ]:
            with self.subTest(f"{method} {path}"):
                status, answer = controller.request(method, path, *body)
                self.assertEqual(status, expected, answer)

    def test_lets_the_controller_start_as_its_deployment_says(self):
        here, there = self.applied()
        token = self.account(here, "agl-controller").token
        with tempfile.TemporaryDirectory() as folder:
            cluster = {"server": self.api.server, "insecure-skip-tls-verify": True}
            kubeconfig = Path(folder, "kubeconfig")
            kubeconfig.write_text(json.dumps({
                "apiVersion": "v1", "kind": "Config", "current-context": "test",
                "clusters": [{"name": "test", "cluster": cluster}],
                "users": [{"name": "test", "user": {"token": token}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            }))
            process, address = gateway(folder)
            places = {
                "/etc/agl": folder, "/work": f"{folder}/controller", "http://agl-gateway:8080": address,
                "$(AGL_GATEWAY_SERVICE_HOST)": "10.0.0.9",
            }
            lease = f"/apis/coordination.k8s.io/v1/namespaces/{there}/leases/agl-controller"
            with process, Component("controller", folder, places, {"KUBECONFIG": str(kubeconfig)}, [f"--rollouts-namespace={there}"]) as controller:
                controller.wait_for(lambda: self.api.request("GET", lease)[0] == 200)
                # Watches that are refused would be told of.
                time.sleep(1)
                self.assertNotIn("orbidden", controller.log.read_text())


if __name__ == "__main__":
    unittest.main()
