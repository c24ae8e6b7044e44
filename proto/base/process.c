/* See process.h. */
#include "proto/base/process.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define START_TIME_FIELD 22

bool process_read(pid_t pid, struct process *ret_process)
{
    char path[40], text[1024];
    if (pid <= 0)
        return false;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    const ssize_t bytes = read(fd, text, sizeof text - 1);
    close(fd);
    if (bytes <= 0)
        return false;
    text[bytes] = '\0';
    /* The second field is a name in parentheses and may hold anything, parentheses too. */
    const char *at = strrchr(text, ')');
    if (at == NULL || at[1] != ' ' || at[2] == '\0')
        return false;
    struct process process = { .state = at[2] };
    at += 2;
    for (int field = 3; field < START_TIME_FIELD && at != NULL; field++) {
        at = strchr(at, ' ');
        at = at != NULL ? at + 1 : NULL;
    }
    if (at == NULL)
        return false;
    process.start_time = strtoull(at, NULL, 10);
    *ret_process = process;
    return true;
}

static const char *state_name(char state)
{
    switch (state) {
    case 'R':
        return "running";
    case 'T':
    case 't':
        return "stopped";
    case 'Z':
    case 'X':
    case 'x':
        return "gone";
    default:
        return "sleeping";
    }
}

const char *process_state(pid_t pid, uint64_t start_time)
{
    struct process process;
    if (pid <= 0 || start_time == 0)
        return "unknown"; /* of another pid namespace, or hidden from us from the first */
    if (!process_read(pid, &process) || process.start_time != start_time)
        return "gone";
    return state_name(process.state);
}

const char *process_state_now(pid_t pid)
{
    struct process process;
    if (pid <= 0)
        return "unknown";
    return process_read(pid, &process) ? state_name(process.state) : "gone";
}

bool process_close(void)
{
    return prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0;
}

int process_core_dumps(void)
{
    const char *value = getenv("SHARDD_CORE_DUMPS");
    if (value == NULL || value[0] == '\0' || strcmp(value, "0") == 0)
        return 0;
    return strcmp(value, "1") == 0 ? 1 : -1;
}
