/* A process as the kernel describes it. Any thread. */
#ifndef SHD_PROCESS_H
#define SHD_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct process {
    char state;          /* of /proc/PID/stat */
    uint64_t start_time; /* in clock ticks since boot */
};

/* False: there is none. A few microseconds. */
bool process_read(pid_t pid, struct process *ret_process);

/* "running", "sleeping", "stopped", "gone"; also "gone" when pid is another process by now, and
 * "unknown" when start_time is 0. */
const char *process_state(pid_t pid, uint64_t start_time);

/* The same of whatever process has the pid now; "unknown" when pid is 0. */
const char *process_state_now(pid_t pid);

/* Close this process's memory and descriptors to every other one but root's: no core dump, no
 * ptrace, no /proc/PID/mem, fd, maps or environ, whose user is root by then. Children are as open
 * as ever once they have executed a program. False: refused (seccomp). */
bool process_close(void);

/* 1: SHARDD_CORE_DUMPS asks to leave it open, to be debugged. 0: it does not. -1: it is neither 0
 * nor 1. */
int process_core_dumps(void);

#endif
