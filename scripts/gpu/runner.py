"""Items with a time limit each, their results on the screen and in a JSON file after each one.

An item ends with all it started, also what left its process group: this process takes its orphans over
(PR_SET_CHILD_SUBREAPER). What cannot be ended, since it sleeps in the kernel, is left behind after a
few seconds: it does not eat the others' time.
"""
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time

TAIL = 16000        # characters of an output that the JSON keeps of a failure
TAIL_PASSED = 1500  # and of what passed
LOG_BYTES = 1 << 20  # of each log in the archive: its end
PR_SET_CHILD_SUBREAPER = 36


class NotTried(Exception):
    """What an item needs is not here; the text says what."""


class Failed(Exception):
    """The text says how."""


class Runner:
    """Runs items one after the other; `seconds` for all of them together."""

    def __init__(self, logs, json_path, seconds, head):
        self.logs, self.json_path = logs, json_path
        self.end = time.monotonic() + seconds
        self.document = {'schema': 1, **head, 'done': False, 'items': []}
        self.deadline = self.end
        self.group = None
        self.log = os.path.join(logs, 'setup.log')
        self.figures = []
        self.kept = set()   # pids of what runs beside the items
        self.watch = None   # called with the item's name after a failure: what the machine says then
        os.makedirs(logs, exist_ok=True)
        try:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        except (OSError, AttributeError):
            pass
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self.stopped)

    def stopped(self, number, _frame):
        self.kill()
        self.pack()
        raise SystemExit(f'gpu-check: ended by signal {number}')

    # -- Commands of an item -----------------------------------------------------------------------

    def kill(self):
        """The process group of the command that runs, all of it."""
        if self.group is None:
            return
        for number, wait_s in ((signal.SIGTERM, 3), (signal.SIGKILL, 5)):
            try:
                os.killpg(self.group.pid, number)
            except ProcessLookupError:
                pass
            try:
                self.group.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
        try:  # what the leader left behind
            os.killpg(self.group.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.group = None
        self.end_orphans()

    def end_orphans(self):
        """Processes that an item started and that are ours now."""
        for _ in range(5):
            found = [pid for pid in children(os.getpid()) if pid not in self.kept]
            if not found:
                return
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.05)
            for pid in found:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    pass

    def beside(self, argv, log, env=None, text=''):
        """A process that runs while items do, in a session of its own, and reads text; None when it
        cannot start."""
        try:
            with open(os.path.join(self.logs, log), 'wb') as f, tempfile.TemporaryFile() as given:
                given.write(text.encode())
                given.seek(0)
                process = subprocess.Popen(argv, stdin=given, stdout=f, stderr=subprocess.STDOUT, env=env,
                                           start_new_session=True)
        except OSError:
            return None
        self.kept.add(process.pid)
        return process

    def end_beside(self, process, wait_s=0):
        """End it, if it has not ended within wait_s; its exit code, None when it had to be ended."""
        if process is None:
            return None
        try:
            return process.wait(wait_s)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        self.kept.discard(process.pid)
        return None

    def run(self, argv, env=None, cwd=None, seconds=None):
        """(exit code, stdout and stderr) of a command, in a process group of its own. Failed when it
        is not through by the item's deadline."""
        left = self.deadline - time.monotonic()
        left = min(left, seconds) if seconds is not None else left
        if left <= 0:
            raise Failed('no time left')
        with open(self.log, 'ab') as log:
            log.seek(0, os.SEEK_END)
            log.write(f'$ {" ".join(argv)}\n'.encode())
            log.flush()
            start = log.tell()
            try:
                self.group = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log,
                                              stderr=subprocess.STDOUT, env=env, cwd=cwd,
                                              start_new_session=True)
            except OSError as e:
                raise Failed(f'cannot start {argv[0]}: {e.strerror}') from e
            try:
                code = self.group.wait(left)
            except subprocess.TimeoutExpired:
                code = None
        self.kill()
        with open(self.log, 'rb') as log:
            log.seek(start)
            text = log.read().decode(errors='replace')
        self.take_figures(text)
        if code is None:
            raise Failed(f'not through after {left:.0f} s: {os.path.basename(argv[0])}')
        return code, text

    def take_figures(self, text):
        for line in text.splitlines():
            if line.startswith('{"name"'):
                try:
                    self.figures.append(json.loads(line))
                except ValueError:
                    pass

    def figure(self, name):
        """The median of a figure of this item; None when there is none of that name."""
        return next((f['value'] for f in self.figures if f['name'] == name), None)

    def must(self, argv, **more):
        """The output of a command that ends with 0."""
        code, text = self.run(argv, **more)
        if code == 77:
            raise NotTried(last_line(text))
        if code != 0:
            signal_name = f'signal {-code}' if code < 0 else f'code {code}'
            raise Failed(f'{signal_name}: {last_line(text)}')
        return text

    # -- Items -------------------------------------------------------------------------------------

    def item(self, name, limit_s, fn, may_skip):
        self.log = os.path.join(self.logs, re.sub('[^a-z0-9_.-]', '_', name) + '.log')
        open(self.log, 'wb').close()
        self.figures = []
        start = time.monotonic()
        self.deadline = min(start + limit_s, self.end)
        print(f'== {name} (at most {max(0, self.deadline - start):.0f} s)', flush=True)
        try:
            if self.end - start < 2:
                raise NotTried('out of time') if may_skip else Failed('not run: out of time')
            result, text = 'passed', fn(self) or ''
        except NotTried as e:
            result, text = 'not tried' if may_skip else 'failed', str(e)
        except Failed as e:
            result, text = 'failed', str(e)
        except Exception as e:  # a bug of ours must not take the rest along
            result, text = 'failed', f'{type(e).__name__}: {e}'
        finally:
            self.kill()
        self.add(name, result, text, time.monotonic() - start)

    def add(self, name, result, text, seconds):
        one = {'name': name, 'result': result, 'figure': text, 'seconds': round(seconds, 1),
               'figures': self.figures}
        with open(self.log, 'rb') as f:
            output = f.read().decode(errors='replace')
        one['output'] = output[-(TAIL if result == 'failed' else TAIL_PASSED):]
        if result == 'failed':
            print(''.join('   | ' + line[:160] + '\n' for line in output.splitlines()[-8:]), end='')
            one['after'] = self.watch(name) if self.watch is not None else ''
        self.document['items'].append(one)
        print(f'   {result}: {text} ({seconds:.1f} s)', flush=True)
        self.write()

    def write(self):
        if self.json_path is None:
            return
        try:
            with open(self.json_path + '.new', 'w', encoding='utf-8') as f:
                json.dump(self.document, f, indent=1)
                f.write('\n')
            os.replace(self.json_path + '.new', self.json_path)
        except OSError as e:  # the screen still has what matters
            print(f'gpu-check: {self.json_path}: {e.strerror}', flush=True)

    def pack(self):
        """All logs beside the JSON file, cut to their ends."""
        if self.json_path is None:
            return
        path = re.sub(r'\.json$', '', self.json_path) + '-logs.tar.gz'
        try:
            with tarfile.open(path, 'w:gz') as tar:
                for folder, _, names in sorted(os.walk(self.logs)):
                    for name in sorted(names):
                        add_end(tar, os.path.join(folder, name), self.logs)
        except OSError as e:
            print(f'gpu-check: {path}: {e.strerror}', flush=True)

    def close(self, targets=()):
        """The table, and beside it what figures should be; the exit code. targets: (figure, at
        least, what it is)."""
        items = self.document['items']
        counts = {r: sum(i['result'] == r for i in items) for r in ('passed', 'failed', 'not tried')}
        figures = {f['name']: f for i in items for f in i['figures']}
        self.document['targets'] = [{'name': name, 'at_least': least, 'value': figures[name]['value']}
                                    for name, least, _ in targets if name in figures]
        self.document.update(done=True, **{k.replace(' ', '_'): n for k, n in counts.items()})
        self.write()
        self.pack()
        width = max([len(i['name']) for i in items] + [4])
        print(f'\n{"item":{width}}  {"result":9}  {"seconds":>7}  figure')
        for i in items:
            print(f'{i["name"]:{width}}  {i["result"]:9}  {i["seconds"]:7.1f}  {i["figure"][:150]}')
        for name, least, what in targets:
            if name in figures:
                value = figures[name]['value']
                verdict = '' if least is None else f' (wanted {least:g}: {"met" if value >= least else "NOT MET"})'
                print(f'{what}: {value:.4g}{verdict}')
        print(', '.join(f'{n} {r}' for r, n in counts.items()), flush=True)
        return 0 if counts['failed'] == 0 and counts['passed'] > 0 else 1


def add_end(tar, path, base):
    with open(path, 'rb') as f:
        size = os.fstat(f.fileno()).st_size
        info = tarfile.TarInfo(os.path.relpath(path, base))
        info.size = min(size, LOG_BYTES)
        f.seek(size - info.size)
        tar.addfile(info, f)


def children(parent):
    """Pids whose parent that is."""
    found = []
    for name in os.listdir('/proc'):
        try:
            if name.isdigit():
                with open(f'/proc/{name}/stat', 'rb') as f:
                    if int(f.read().rpartition(b')')[2].split()[1]) == parent:
                        found.append(int(name))
        except (OSError, IndexError):
            pass
    return found


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else 'no output'


def answer(text):
    """What a program that answers a question says last."""
    lines = [line for line in text.splitlines() if line.startswith('answer: ')]
    return lines[-1][len('answer: '):] if lines else last_line(text)


if __name__ == '__main__':
    sys.exit('gpu-check: run scripts/gpu-check.sh')
