# The zygote of a controller. It imports once; every start that is asked for forks a process with all of that.
#
# A start forks twice. The first child becomes the attempt's supervisor by exec, so that the second, the agent, is the
# supervisor's own child: its exit status, its group and its orphans are the supervisor's, and the zygote may die without
# harm to anybody. The agent waits until the supervisor has sent it its command. No key ever comes near the zygote.
#
# Standard input is a socket to the controller, one packet a message: first this text, then what to import; the answer is
# "ready" or why not. Then each packet is the program and the command line of a supervisor, with its standard streams as
# descriptors and, where no program is named, with that too; the answer is the supervisor's process number. The end of the
# socket is the end of the zygote.
import fcntl
import gc
import importlib.machinery
import os
import signal
import socket
import sys
import time

# What the supervisor finds beyond its standard streams; the same numbers are in supervisor/warm.rs.
COMMAND, STDOUT, STDERR, READY, PROGRAM = 3, 4, 5, 6, 7
WARM_AGENT = b"AGL_WARM_AGENT"


class Beginning:
    """How the interpreter was before any import."""

    def __init__(self):
        with open("/proc/self/environ", "rb") as file:
            self.environ = dict(pair.split(b"=", 1) for pair in file.read().split(b"\0") if b"=" in pair)
        # A locale may be coerced; a cold interpreter would do it again.
        self.added = {name: value for name, value in os.environb.items() if self.environ.get(name) != value}
        self.handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self.umask = os.umask(0o077)
        os.umask(self.umask)
        self.cwd = os.getcwd()
        self.unbuffered = bool(self.environ.get(b"PYTHONUNBUFFERED"))

    def restore(self):
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number, handler in self.handlers.items():
            # None is a handler that Python did not set and cannot set again.
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        os.umask(self.umask)


def import_all(names):
    """Why the zygote cannot be used, or nothing."""
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            return f"the import of {name} failed: {type(error).__name__}: {error}"
        tasks = len(os.listdir("/proc/self/task"))
        if tasks > 1:
            threading = sys.modules.get("threading")
            known = [thread.name for thread in threading.enumerate()[1:]] if threading else []
            named = f" ({', '.join(known)})" if known else ""
            return f"the import of {name} started {tasks - 1} threads{named}; a process with threads cannot be forked safely"
    return None


def python_path(value):
    entries = [os.path.abspath(os.fsdecode(entry)) for entry in value.split(b":")] if value else []
    return list(dict.fromkeys(entries))


def serve(control, beginning):
    """Forks for every request. Returns in agents only, with the descriptors they talk to their supervisor by."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 8, socket.MSG_CMSG_CLOEXEC)
        if not request:
            os._exit(0)
        try:
            child = os.fork()
        except OSError as error:
            control.send(f"the zygote cannot fork: {error}".encode())
        else:
            if child == 0:
                return fork_agent(control, request, descriptors, beginning)
            control.send(b"%d" % child)
        for descriptor in descriptors:
            os.close(descriptor)


def fork_agent(control, request, descriptors, beginning):
    """Forks the agent and becomes its supervisor. Returns in the agent."""
    # The session of its own that a supervisor always has; the agent must be in it from the start.
    os.setsid()
    environ = dict(beginning.environ)
    pipes = [os.pipe() for _ in range(4)]
    (command, to_agent), (stdout, to_stdout), (stderr, to_stderr), (ready, to_supervisor) = pipes
    try:
        agent = os.fork()
    except OSError:
        # The supervisor starts the agent itself.
        agent = None
    if agent == 0:
        os.setpgid(0, 0)
        control.close()
        for descriptor in (*descriptors, to_agent, stdout, stderr, ready):
            os.close(descriptor)
        for descriptor, number in ((to_stdout, 1), (to_stderr, 2)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        return command, to_supervisor
    if agent:
        try:
            os.setpgid(agent, agent)
        except OSError:
            # It was faster.
            pass
        environ[WARM_AGENT] = b"%d" % agent
    become_supervisor(
        request, (*descriptors[:3], to_agent, stdout, stderr, ready, *descriptors[3:]), environ, beginning
    )


def become_supervisor(request, descriptors, environ, beginning):
    # First out of the way of the numbers that they are to have.
    descriptors = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, PROGRAM + 1) for descriptor in descriptors]
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number, inheritable=number != PROGRAM)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > PROGRAM:
            try:
                os.close(int(name))
            except OSError:
                # The one that the list was read by.
                pass
    try:
        os.chdir(beginning.cwd)
        beginning.restore()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            # Python ignores them, and what is ignored stays so over an exec.
            signal.signal(number, signal.SIG_DFL)
        program, *arguments = request.split(b"\0")
        os.execvpe(program, arguments, environ) if program else os.execve(PROGRAM, arguments, environ)
    except OSError as error:
        os.write(2, f"the zygote cannot start a supervisor: {error}\n".encode())
    finally:
        os._exit(127)


def receive(descriptor):
    """The fields of the agent's command; nothing where the supervisor died before it had said all."""
    packets = []
    while packet := os.read(descriptor, 1 << 16):
        packets.append(packet)
    os.close(descriptor)
    count, _, rest = b"".join(packets).partition(b"\0")
    fields = rest.split(b"\0")
    return iter(fields) if count and len(fields) == int(count) else None


def take(fields):
    return [os.fsdecode(next(fields)) for _ in range(int(next(fields)))]


def unbuffered(number, stream):
    # As the interpreter makes it under -u.
    raw = open(number, "wb", buffering=0, closefd=False)
    io = sys.modules["io"]
    raw.name = stream.name
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, newline="\n", write_through=True)


def look_fresh(kind, is_unbuffered, cwd, original, arguments, environ, beginning, path):
    """Makes this process what the interpreter would have made of the command."""
    beginning.restore()
    os.chdir(cwd)
    zone = os.environb.get(b"TZ")
    os.environ.clear()
    os.environb.update(beginning.added)
    os.environb.update(environ)
    if environ.get(b"TZ") != zone:
        time.tzset()
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = original
    sys.argv[:] = [{"module": "-m", "code": "-c"}.get(kind, arguments[0]), *arguments[1:]]
    first = {"module": os.getcwd(), "code": ""}.get(kind, os.path.dirname(os.path.realpath(arguments[0])))
    # -P, by the environment that the controller and the agent share.
    first = [] if getattr(sys.flags, "safe_path", False) else [first]
    from_environment = python_path(environ.get(b"PYTHONPATH"))
    sys.path[:] = first + from_environment + [entry for entry in path if entry not in from_environment]
    # Finders remember what folders held.
    sys.path_importer_cache.clear()
    if is_unbuffered and not beginning.unbuffered:
        sys.stdout = sys.__stdout__ = unbuffered(1, sys.__stdout__)
        sys.stderr = sys.__stderr__ = unbuffered(2, sys.__stderr__)
    # `random` of the standard library looks after itself in a forked process.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def set_shown_lines(code, source):
    """What tracebacks show of `-c`, which they do from 3.13 on: so far the line that started the zygote."""
    linecache = sys.modules.get("linecache")
    register = getattr(linecache, "_register_code", None)
    if register is not None:
        register(code if hasattr(linecache, "_interactive_cache") else "<string>", source, "<string>")


def run(kind, arguments):
    if kind != "code":
        set_shown_lines(compile("", "<string>", "exec"), "")
    if kind == "module":
        import runpy

        runpy._run_module_as_main(arguments[0])
        return
    namespace = sys.modules["__main__"].__dict__
    if kind == "code":
        source = arguments[0]
        if sys.version_info >= (3, 14) and source[:1].isspace():
            import textwrap

            source = textwrap.dedent(source)
        code = compile(source, "<string>", "exec", dont_inherit=True)
        set_shown_lines(code, source)
        exec(code, namespace)
        return
    script = os.path.join(os.getcwd(), arguments[0])
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    namespace.update(__file__=script, __cached__=None, __loader__=loader)
    exec(compile(loader.get_data(script), script, "exec", dont_inherit=True), namespace)


def without_zygote(trace):
    def is_ours(trace):
        return trace.tb_frame.f_code.co_filename == "<agl zygote>"

    # Outermost is the line that started us.
    while trace is not None and not is_ours(trace):
        trace = trace.tb_next
    while trace is not None and is_ours(trace):
        trace = trace.tb_next
    return trace


def main():
    beginning = Beginning()
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    count, *words = os.fsdecode(control.recv(1 << 20)).split("\0")
    imports, folders = words[: int(count)], words[int(count) :]
    own = [] if getattr(sys.flags, "safe_path", False) else sys.path[:1]
    sys.path[:0] = folders
    problem = import_all(imports)
    sys.stdout.flush()
    sys.stderr.flush()
    control.send((problem or "ready").encode())
    if problem:
        os._exit(1)
    for entry in (*folders, *own, *python_path(beginning.environ.get(b"PYTHONPATH"))):
        if entry in sys.path:
            sys.path.remove(entry)
    path = list(sys.path)
    # Supervisors are not waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    # What is there now is never looked at again, so that its pages stay shared.
    gc.freeze()

    command, ready = serve(control, beginning)
    fields = receive(command)
    if fields is None:
        os._exit(1)
    kind, is_unbuffered, cwd = (os.fsdecode(next(fields)) for _ in range(3))
    original, arguments = take(fields), take(fields)
    environ = dict(field.split(b"=", 1) for field in fields)
    look_fresh(kind, is_unbuffered == "unbuffered", cwd, original, arguments, environ, beginning, path)
    os.write(ready, b"1")
    os.close(ready)
    try:
        run(kind, arguments)
    except BaseException as error:
        # The interpreter does with it what it always does; only our frames are not to be seen.
        hook = sys.excepthook
        sys.excepthook = lambda kind, value, trace: hook(
            kind, value.with_traceback(without_zygote(trace)), without_zygote(trace)
        )
        raise


main()
