import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from kerasdist.cluster import Cluster, resolve
from kerasdist.cluster.schedulers import expand_hostlist, expand_tasks_per_node
from kerasdist.errors import ClusterError

TWO = {"worker": ["a:1", "b:1"]}


def tf_config(cluster=None, task=None, **more):
    more |= {} if cluster is None else {"cluster": cluster}
    more |= {} if task is None else {"task": task}
    return {"TF_CONFIG": json.dumps(more)}


def task(task_type, index):
    return {"type": task_type, "index": index}


def error_of(environ=None, cluster=None):
    with pytest.raises(ClusterError) as caught:
        resolve(cluster, environ or {})
    return str(caught.value)


SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    "environ",
    [
        *({}, {"TF_CONFIG": " \n"}, {"TF_CONFIG": "{}"}),
        # A plain batch script: nobody started several tasks with srun.
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        SRUN | {"SLURM_STEP_ID": "4294967291", "SLURM_NTASKS": "4"},
        # One process of mpirun, and a shell of srun's: alone.
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"},
        SRUN | {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"PMIX_RANK": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290"},
        SRUN | {"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"},
        # One task: alone.
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_no_settings_is_one_worker(environ):
    found = resolve(environ=environ)
    assert found == Cluster(rank=0, size=1, source="none")
    assert (found.is_chief, found.address, found.workers) == (True, None, ())


ALL = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["s:1", "s:2"]}
# Of Kubeflow's operator.
TFJOB = {"worker": [f"digits-worker-{i}.default.svc:2222" for i in (0, 1)]}
OLD = {"master": ["c:1"], "worker": ["a:1", "b:1"]}
WORKERS = ("c:1", "a:1", "b:1")


@pytest.mark.parametrize(
    ("jobs", "who", "rank", "workers", "address"),
    [
        (TWO, task("worker", 1), 1, ("a:1", "b:1"), "b:1"),
        # The chief comes first, and master is its old name.
        (ALL, {"type": "chief"}, 0, WORKERS, "c:1"),
        (OLD, task("master", 0), 0, WORKERS, "c:1"),
        (ALL, task("worker", 1), 2, WORKERS, "b:1"),
        # A server is no worker, and an evaluator is a job of one.
        (ALL, task("ps", 1), None, WORKERS, "s:2"),
        (TWO | {"evaluator": ["e:1"]}, task("evaluator", 0), 0, (), None),
        (TFJOB, task("worker", 1), 1, tuple(TFJOB["worker"]), TFJOB["worker"][1]),
    ],
)
def test_the_place_of_a_task(jobs, who, rank, workers, address):
    found = resolve(environ=tf_config(jobs, who))
    assert (found.rank, found.size) == (rank, len(workers) or 1)
    assert (found.workers, found.address) == (workers, address)
    assert found.is_chief == (rank == 0)
    kind = "chief" if who["type"] == "master" else who["type"]
    assert (found.task_type, found.task_index) == (kind, who.get("index", 0))
    assert found.source == "TF_CONFIG"
    if kind != "evaluator":
        assert found.servers == tuple(jobs.get("ps", ()))


def test_lists_may_be_dictionaries_and_numbers_texts():
    jobs = {"worker": {"1": "[fe80::1%eth0]:1", "0": "[::1]:2"}}
    found = resolve(environ=tf_config(jobs, task("worker", "1")))
    assert (found.rank, found.workers) == (1, ("[::1]:2", "[fe80::1%eth0]:1"))


@pytest.mark.parametrize("who", [None, {}, task("worker", 0)])
def test_a_task_without_a_cluster_is_alone(who):
    for jobs in (None, {}, {"ps": []}):
        found = resolve(environ=tf_config(jobs, who, environment="cloud"))
        assert (found.rank, found.size, found.workers) == (0, 1, ())
        assert found.source == "TF_CONFIG"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"cluster": ', r"TF_CONFIG isn't JSON: .* line 1, column 13"),
        ("{'task': {}}", r"isn't JSON: .* JSON wants double quotes"),
        ("[1]", r"TF_CONFIG is a list\. Expected a dictionary"),
        ("[" * 100_000, r"TF_CONFIG isn't usable JSON"),
        ('{"cluster": 1' + "0" * 5000 + "}", r"TF_CONFIG (isn't|can't)"),
    ],
)
def test_what_isnt_a_json_dictionary(text, said):
    with pytest.raises(ClusterError, match=rf"^TF_CONFIG can't be used\. .*{said}"):
        resolve(environ={"TF_CONFIG": text})


@pytest.mark.parametrize(
    ("jobs", "who", "said"),
    [
        (TWO, None, "There is no 'task'"),
        (TWO, {"type": "worker"}, "'task' has no 'index'"),
        (TWO, task("workers", 0), r"task\['type'\]='workers'\. Expected 'chief'"),
        (TWO, task("chief", 0), "This process is a chief, and the cluster has none"),
        (TWO, task("worker", 2), r"out of range\..*=2.* 2 addresses\. Expected 0\.\.1"),
        (TWO, task("worker", -1), r"no integer >= 0\. Received: task\['index'\]=-1"),
        (TWO, task("worker", "9" * 5000), "task.'index'. is no integer"),
        (None, task("worker", 1), "no 'cluster', yet this process is worker 1"),
        ([], task("worker", 0), "'cluster' is a list"),
        ({"workers": ["a:1"]}, task("worker", 0), "unknown task type.*'workers'"),
        ({"worker": []}, task("worker", 0), r"cluster\['worker'\] is empty"),
        ({"chief": ["a:1", "b:1"]}, task("chief", 0), "'cluster' has 2 chiefs"),
        ({"ps": ["s:1"]}, task("ps", 0), "'cluster' has no task that trains"),
        ({"worker": {"0": "a:1", "2": "b:1"}}, task("worker", 0), "has gaps"),
        (
            *({"chief": ["[::1]:1"], "ps": ["[0:0::1]:1"]}, task("chief", 0)),
            "The same address stands at two places",
        ),
        *(
            ({"worker": ["a:1", address]}, task("worker", 0), rf"'\]\[1\] {said}.*Exp")
            for address, said in (
                ("", "is empty"),
                (2222, "is a int, not a text"),
                ("host:²", "has a port that is no number"),
                ("host:0", r"has a port outside 1\.\.65535, 0"),
                (":2222", "has no host"),
                ("grpc://host:2222", "has a scheme in front"),
                ("host/x:2222", "has a host that can't be one"),
                ("::1:2222", "has more than one ':' .*brackets"),
                ("[host]:2222", "has something in brackets that is no IPv6 address"),
            )
        ),
    ],
)
def test_what_is_wrong_is_said(jobs, who, said):
    with pytest.raises(
        ClusterError,
        match=rf"^TF_CONFIG can't be used\. .*{said}.*\nReceived: TF_CONFIG=",
    ):
        resolve(environ=tf_config(jobs, who))


def test_all_faults_come_in_one_message_which_is_not_long():
    jobs = {"chief": ["c:0"], "worker": ["a", "b:1", "b:1"], "gpu": []}
    said = error_of(tf_config(jobs, task("boss", "x"), more="x" * 5000))
    assert said.startswith("TF_CONFIG can't be used, for 6 reasons:\n  1. ")
    for number in range(1, 7):
        assert f"\n  {number}. " in said
    assert "\nReceived: TF_CONFIG='{" in said
    assert len(said) < 2000


class Resolver:
    def __init__(self, jobs, *task):
        self._jobs, self._task = jobs, task
        self.task_type = self.task_id = None

    def cluster_spec(self):
        # Slurm's knows its task after the cluster.
        self.task_type, self.task_id = self._task or (None, None)
        return SimpleNamespace(as_dict=lambda: self._jobs)


def test_a_resolver_that_fails():
    with pytest.raises(
        ClusterError,
        match=r"^The cluster resolver \(Resolver\) failed: ValueError: too many val",
    ) as caught:
        resolve(Resolver(TWO, *"many"), {})
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_cluster_of_a_wrong_type():
    with pytest.raises(ClusterError, match=r"^`cluster` is of a type .* Expected a tf"):
        resolve(["a:1"], {})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rank": 0, "size": 0}, "There is no worker"),
        ({"rank": 2, "size": 2, "workers": ("a:1", "b:1")}, "rank is out of range"),
        ({"rank": 0, "size": 2, "workers": ("a:1",)}, "as many addresses"),
        ({"rank": None, "size": 1}, "Expected rank=None for a 'ps' task, and only"),
        ({"rank": None, "size": 1, "task_type": "ps"}, "a place in `servers`"),
        ({"rank": 0, "size": 1, "workers": ("a",)}, "An address has no port"),
    ],
)
def test_a_cluster_checks_itself(values, said):
    with pytest.raises(ClusterError, match=rf"(?s)^The cluster can't be used.*{said}"):
        Cluster(**values)


def test_tensorflows_resolvers():
    tf = pytest.importorskip("tensorflow")

    spec = tf.train.ClusterSpec({"worker": ["a:1", "b:1"], "ps": {0: "s:1"}})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type="worker", task_id=1
    )
    found = resolve(resolver, {})
    assert (found.rank, found.workers, found.servers) == (1, ("a:1", "b:1"), ("s:1",))
    resolver.task_id = np.int64(1)
    assert type(resolve(resolver, {}).task_index) is int


def step(procid, tasks, nodes, per_node, **more):
    given = {"JOB_ID": "1000", "STEP_ID": "0", "PROCID": str(procid)}
    given |= {"STEP_NUM_TASKS": str(tasks), "STEP_NODELIST": nodes}
    given["STEP_TASKS_PER_NODE"] = per_node
    return {f"SLURM_{name}": value for name, value in given.items()} | more


def hosts(workers):
    return [address.rpartition(":")[0] for address in workers]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "a a a b b"),
        ({"SLURM_DISTRIBUTION": "block:cyclic"}, "a a a b b"),
        ({"SLURM_DISTRIBUTION": "cyclic"}, "a b a b a"),
        ({"SLURM_DISTRIBUTION": "plane=2"}, "a a b b a"),
        ({"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"}, "a a b b a"),
    ],
)
def test_slurm_layouts(more, expected):
    found = [resolve(environ=step(i, 5, "a,b", "3,2", **more)) for i in range(5)]
    assert [each.rank for each in found] == [0, 1, 2, 3, 4]
    assert {each.source for each in found} == {"Slurm"}
    (workers,) = {each.workers for each in found}
    assert hosts(workers) == expected.split()
    ports = [int(address.rpartition(":")[2]) for address in workers]
    local = [expected.split()[:i].count(expected.split()[i]) for i in range(5)]
    assert ports == [ports[0] + each for each in local]
    assert 20000 <= ports[0] < 30000


def test_slurm_jobs_and_steps_have_ports_of_their_own():
    def port(job, number):
        environ = step(0, 2, "a", "2", SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(number))
        return int(resolve(environ=environ).workers[0].rpartition(":")[2])

    ports = sorted(port(job, 0) for job in range(1000, 1156))
    assert min(b - a for a, b in itertools.pairwise(ports)) == 64
    assert len({port(1000, number) for number in range(100)}) == 100


def test_slurm_older_names():
    new = step(1, 2, "n[1-2]", "1(x2)")
    names = {
        "SLURM_JOB_ID": "SLURM_JOBID",
        "SLURM_STEP_ID": "SLURM_STEPID",
        "SLURM_STEP_NUM_TASKS": "SLURM_NTASKS",
        "SLURM_STEP_NODELIST": "SLURM_JOB_NODELIST",
        "SLURM_STEP_TASKS_PER_NODE": "SLURM_TASKS_PER_NODE",
    }
    old = {names.get(name, name): value for name, value in new.items()}
    assert resolve(environ=old) == resolve(environ=new)


def test_hostlists():
    assert expand_hostlist("n[01-03,07],gpu5") == ["n01", "n02", "n03", "n07", "gpu5"]
    assert expand_hostlist("r[1-2]n[9-10]") == ["r1n9", "r1n10", "r2n9", "r2n10"]
    assert expand_hostlist("n[1,3]-ib.x,m") == ["n1-ib.x", "n3-ib.x", "m"]
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("expand", "text"),
    [
        *((expand_hostlist, text) for text in ("", "n[1-2", "n1]", "n[]", "n[a]")),
        *((expand_hostlist, text) for text in ("n[3-1]", "n[1-2-3]", "n[1-999999999]")),
        *((expand_hostlist, x) for x in ("n[1-60000],m[1-60000]", "n[1-300]x[1-300]")),
        *((expand_tasks_per_node, text) for text in ("", "x", "2(3)", "1(x999999)")),
    ],
)
def test_lists_that_are_wrong(expand, text):
    with pytest.raises(ValueError, match=r"^(it|its|the range|'.*') "):
        expand(text)


MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}
# Of a daemon that mpirun started with srun, one on each of two nodes.
DAEMONS = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    "environ",
    [
        *(MPI, {**MPI, "TF_CONFIG": "{}"}, {**MPI, **DAEMONS, "PMIX_RANK": "1"}),
        *({"PMI_RANK": "1", "PMI_SIZE": "3"}, HYDRA, {**HYDRA, **DAEMONS}),
    ],
)
def test_a_process_of_mpirun(environ):
    found = resolve(environ=environ)
    assert (found.source, found.rank, found.size) == ("MPI", 1, 3)
    assert (found.task_type, found.task_index) == ("worker", 1)
    assert (found.workers, found.address, found.needs_mpi) == ((), None, True)
    # One of PMIx doesn't know how many there are.
    found = resolve(environ={"PMIX_RANK": "1"})
    assert (found.source, found.needs_mpi) == ("PMIx", True)


SLURM = step(1, 4, "n[1-2]", "2(x2)")
MINE = tf_config(TWO, task("worker", 1))
SETTINGS = {"cluster": TWO, "task": task("worker", 1)}
ONE = {"TF_CONFIG": "not even JSON"}


@pytest.mark.parametrize(
    ("cluster", "environ", "source", "rank", "size"),
    [
        (Resolver(TWO, "worker", 1), ONE, "cluster resolver", 1, 2),
        # Without a cluster: alone.
        (Resolver({}), MINE, "cluster resolver", 0, 1),
        (Resolver({}, "", 0), MINE, "cluster resolver", 0, 1),
        (Resolver({}, "worker", 0), MINE, "cluster resolver", 0, 1),
        (SETTINGS, ONE, "cluster argument", 1, 2),
        ({}, MINE, "cluster argument", 0, 1),
        (Cluster(rank=0, size=1), MINE, "none", 0, 1),
        (None, SLURM | MINE, "TF_CONFIG", 1, 2),
        (None, SLURM | {"TF_CONFIG": "{}"}, "Slurm", 1, 4),
        (None, MPI | MINE, "TF_CONFIG", 1, 2),
        (None, SLURM | {"PMIX_RANK": "1"}, "Slurm", 1, 4),
        (None, SLURM | {"PMI_RANK": "1", "PMI_SIZE": "4"}, "Slurm", 1, 4),
    ],
)
def test_what_comes_before_what(monkeypatch, cluster, environ, source, rank, size):
    found = resolve(cluster, environ)
    assert (found.source, found.rank, found.size) == (source, rank, size)
    assert not found.needs_mpi
    # The process's environment is the default.
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert resolve(cluster) == found


TASKS = "SLURM_STEP_TASKS_PER_NODE"
LAYOUT = "unknown which rank runs on which node.*`srun --distribution=block"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST can't be read"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST isn't set"),
        ({"SLURM_STEP_NODELIST": "a,b"}, "lists don't fit together.*2 nodes"),
        ({TASKS: "3"}, "lists don't fit together.*3 tasks"),
        ({"SLURM_PROCID": "2"}, "SLURM_PROCID is no rank of this step"),
        *(({"SLURM_DISTRIBUTION": x}, LAYOUT) for x in ("arbitrary", "plane=0", "new")),
        ({"SLURM_DISTRIBUTION": "plane"}, LAYOUT),
        *(
            ({"KERASDIST_PORT": x}, f"KERASDIST_PORT can't be used. Received: .*='{x}'")
            for x in ("0", "65535", "x", "-1")
        ),
    ],
)
def test_slurm_settings_that_are_wrong(changed, said):
    nodes = {"SLURM_STEP_NODELIST": "a,b", TASKS: "1(x2)"}
    environ = step(1, 2, "a", "2") | (nodes if said is LAYOUT else {}) | changed
    with pytest.raises(ClusterError, match=rf"(?s)^Slurm's environment can't.*{said}"):
        resolve(environ=environ)


def test_slurm_port_and_own_place():
    found = resolve(environ=step(1, 2, "a", "2", KERASDIST_PORT="4000"))
    assert found.workers == ("a:4000", "a:4001")
    # Rank 1 of a cyclic layout, although nobody said that it is cyclic.
    place = {"SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
    said = error_of(step(1, 4, "a,b", "2(x2)", **place))
    assert said.startswith("Slurm's environment can't be used. ")
    assert "SLURM_NODEID=1" in said
    assert "Expected SLURM_NODEID=0" in said
    right = step(1, 4, "a,b", "2(x2)", SLURM_DISTRIBUTION="cyclic", **place)
    assert hosts(resolve(environ=right).workers) == ["a", "b", "a", "b"]


@pytest.mark.parametrize(("rank", "size"), [("3", "3"), ("", "3"), ("1", "three")])
def test_settings_of_mpi_that_are_wrong(rank, size):
    said = error_of({"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size})
    assert said.startswith(
        "MPI's environment can't be used. OMPI_COMM_WORLD_RANK is no rank of "
        "OMPI_COMM_WORLD_SIZE processes. Expected 0 <= "
    )
    assert f"Received: OMPI_COMM_WORLD_RANK={rank!r}" in said


def test_a_resolver_without_a_task():
    said = error_of(cluster=Resolver(TWO))
    assert said.startswith("The cluster resolver (Resolver) can't be used. ")
    assert "There is no 'task'" in said
    said = error_of(cluster={"cluster": TWO})
    assert said.startswith("`cluster` can't be used. There is no 'task'")
