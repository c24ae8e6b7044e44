"""Items with a time limit each, their results on the screen and in a JSON file after each one."""
import json
import os
import re
import signal
import subprocess
import sys
import time

TAIL = 4000  # characters of an output that the JSON keeps


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
        os.makedirs(logs, exist_ok=True)
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self.stopped)

    def stopped(self, number, _frame):
        self.kill()
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
            self.group = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log,
                                          stderr=subprocess.STDOUT, env=env, cwd=cwd,
                                          start_new_session=True)
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
        if result == 'failed':
            one['output'] = output[-TAIL:]
            print(''.join('   | ' + line + '\n' for line in output.splitlines()[-15:]), end='')
        self.document['items'].append(one)
        print(f'   {result}: {text} ({seconds:.1f} s)', flush=True)
        self.write()

    def write(self):
        if self.json_path is None:
            return
        with open(self.json_path + '.new', 'w', encoding='utf-8') as f:
            json.dump(self.document, f, indent=1)
            f.write('\n')
        os.replace(self.json_path + '.new', self.json_path)

    def close(self):
        """The table; the exit code."""
        items = self.document['items']
        counts = {r: sum(i['result'] == r for i in items) for r in ('passed', 'failed', 'not tried')}
        self.document.update(done=True, **{k.replace(' ', '_'): n for k, n in counts.items()})
        self.write()
        width = max([len(i['name']) for i in items] + [4])
        print(f'\n{"item":{width}}  {"result":9}  {"seconds":>7}  figure')
        for i in items:
            print(f'{i["name"]:{width}}  {i["result"]:9}  {i["seconds"]:7.1f}  {i["figure"][:200]}')
        print(', '.join(f'{n} {r}' for r, n in counts.items()), flush=True)
        return 0 if counts['failed'] == 0 and counts['passed'] > 0 else 1


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else 'no output'


def answer(text):
    """What a program that answers a question says last."""
    lines = [line for line in text.splitlines() if line.startswith('answer: ')]
    return lines[-1][len('answer: '):] if lines else last_line(text)


if __name__ == '__main__':
    sys.exit('gpu-check: run scripts/gpu-check.sh')
