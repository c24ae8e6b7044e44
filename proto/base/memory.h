/* How much memory this process may still take: what the host has left, and what the limits of its
 * control groups leave, whichever is less.
 *
 * A process lies in one memory cgroup (of version 2, or of version 1 where that has the memory
 * controller), and the limits of all its ancestors hold too. Of each that is visible here the room
 * is the limit less the usage, and the usage is counted without the file cache that the kernel
 * would drop first (clean pages of files; memfds are none).
 *
 * Failure modes: what cannot be read sets no limit, as on a host without cgroups; what reads
 * otherwise than the kernel writes it is ignored, and said in `ignored`. A container that hides its
 * ancestors hides their limits.
 */
#ifndef SHD_MEMORY_H
#define SHD_MEMORY_H

#include <stdint.h>

#define MEMORY_PATH_BYTES 512u
#define MEMORY_TEXT_BYTES 256u

struct memory_room {
    uint64_t bytes;      /* that may still be taken; UINT64_MAX: nothing is known */
    uint64_t host_bytes; /* MemAvailable; UINT64_MAX: not known */
    /* Of the cgroup with the least room; limit_bytes UINT64_MAX: none has a limit. */
    uint64_t limit_bytes, used_bytes, cgroup_bytes;
    char limit_path[MEMORY_PATH_BYTES]; /* of the file that sets it, below the root */
    char ignored[MEMORY_PATH_BYTES];    /* what did not read as expected, and how; "": nothing */
};

/* root: where /proc and /sys are, "" in production. */
void memory_room_below(const char *root, struct memory_room *ret_room);

static inline struct memory_room memory_room(void)
{
    struct memory_room room;
    memory_room_below("", &room);
    return room;
}

/* "292 MiB are free: 8 of 300 MiB are used, the limit of /sys/fs/cgroup/a/memory.max", or "292 MiB
 * are free on this host". Of a long path the end is shown. */
const char *memory_room_text(const struct memory_room *room, char buf[MEMORY_TEXT_BYTES]);

#endif
