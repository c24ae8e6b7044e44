/* Memory behind a file descriptor, which outlives any one process that maps it.
 *
 * The maker creates a sealed memfd and maps it read-write; a receiver checks size and seals of
 * the fd it was passed before mapping, because a mapping past the end of a file is a SIGBUS, and
 * an unsealed file can be cut by its sender at any time.
 *
 * A readonly kind stays writable through the maker's first mapping only: not even a successor of
 * the maker that was handed the fd can map it writable again. It makes a new one.
 */
#ifndef SHD_SEGMENT_H
#define SHD_SEGMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

/* A segment's contents; the number crosses the wire. */
enum segment_kind {
    SEGMENT_STATE = 1,     /* masters, moments, accumulator: never leaves the daemon */
    SEGMENT_PUBLISH = 2,   /* what workers read */
    SEGMENT_INBOX = 3,     /* a session's gradient slots: the worker writes */
    SEGMENT_BOARD = 4,     /* version words */
    SEGMENT_LEDGER = 5,    /* what a successor needs to go on: never leaves the daemon */
    SEGMENT_SPILL = 6,     /* gradients that wait for their turn: never leaves the daemon */
    SEGMENT_ACTIVITY = 7,  /* what a worker shows of itself, where its inbox is not the host's */
    SEGMENT_STAGE = 8,     /* a unit's values on their way: the worker writes */
    SEGMENT_SPEC = 9,      /* a spec that no message holds: spec_segment.h */
    SEGMENT_REQUESTS = 10, /* a session's frames, its page of a pair of rings (ring.h) */
    SEGMENT_REPLIES = 11,  /* and the daemon's */
};

/* The memory that a segment's bytes are in; the number crosses the wire. */
enum segment_place {
    SEGMENT_HOST = 0, /* a memfd */
    SEGMENT_CUDA =
        1, /* a device's memory: a VMM allocation exported as a descriptor. Made and mapped
            * by the device (kernels/kern.h, "Memory"); never to be read by the host */
};

struct segment {
    int fd;     /* owned; -1 when closed */
    void *base; /* owned mapping of the whole, or NULL; SEGMENT_CUDA: an address of the device */
    uint64_t bytes; /* multiple of SHD_PAGE_BYTES */
    enum segment_place place;
    uint64_t handle;     /* SEGMENT_CUDA: owned, the driver's */
    uint64_t huge_bytes; /* of segment_new(): so many were taken in huge pages; else 0, not known:
                          * segment_look_huge() */
    bool file;           /* on a file, not in memory: segment_file.h */
};

/* The format of the trail in a model's kept segments (kernels/kern.h): it must be the same in a
 * process and its successor. */
#define KERN_CHUNK_ELEMS UINT64_C(65536) /* elements that a chunk word is about */
#define KERN_OP_MAX      ((UINT64_C(1) << 46) - 1)
#define KERN_TRAIL_BYTES UINT64_C(229376) /* of a host device's area, for any number of threads */

#define SEGMENT_CLOSED ((struct segment){ .fd = -1 })

/* True when outsiders must not map this kind writable (publish, board, spec, replies): sealed with
 * F_SEAL_FUTURE_WRITE after the maker's own mapping. */
bool segment_kind_readonly(enum segment_kind kind);

/* True for what is passed to workers (or, a spec, by them); also of a number that is no kind. */
bool segment_kind_shared(uint32_t kind);
#define SEGMENT_KINDS_SHARED "1 to 4, or 7 to 11"

/* "publish" ...; "?" for an unknown number. */
const char *segment_kind_name(enum segment_kind kind);

/* "host", "cuda"; "?" for an unknown number. */
const char *segment_place_name(enum segment_place place);

/* Create a zeroed, sealed segment and map it read-write here. bytes > 0 is rounded up to whole
 * pages, and all of them are taken (proto/share/reserve.h), but for a spill segment's, which takes
 * them piece by piece. State, publish and inbox are in huge pages where the host has them. `name`
 * is for /proc/PID/maps. Errors: SHD_ENOMEM, SHD_EIO. */
int segment_new(const char *name, enum segment_kind kind, uint64_t bytes,
                struct segment *ret_segment, struct shd_err *e);

/* Check an fd received from a peer: a memfd of at least `bytes` bytes with the seals of its kind.
 * Does not take the fd. Errors: SHD_ESEGMENT with the values. */
int segment_check(int fd, enum segment_kind kind, uint64_t bytes, struct shd_err *e);

/* Map all of a checked fd (takes ownership of fd on success only); read-only for the kinds that
 * are. Errors: SHD_ENOMEM, SHD_EIO. */
int segment_map(int fd, enum segment_kind kind, uint64_t bytes, struct segment *ret_segment,
                struct shd_err *e);

/* Whether there is room for `bytes` more, by the host and the limits of cgroups. Errors: SHD_ENOMEM
 * with the numbers. */
int segment_room(uint64_t bytes, struct shd_err *e);

/* Take the pages of [offset_bytes, + bytes) of a spill segment; nothing where they were written
 * since it was made or last punched. Waits in turn: not for the loop's thread. Errors: SHD_ENOMEM
 * with the numbers. */
int segment_take(const struct segment *segment, uint64_t offset_bytes, uint64_t bytes,
                 struct shd_err *e);

/* Unmap and close; leaves SEGMENT_CLOSED. A closed or zero-initialised-by-SEGMENT_CLOSED one is a
 * no-op. */
void segment_close(struct segment *segment);

/* Reserve address space (PROT_NONE) into which pieces are then placed side by side. */
int segment_reserve(uint64_t bytes, void **ret_base, struct shd_err *e);

/* Learn how much of a mapped segment of the host's is in huge pages: as much as the kernel maps so
 * when a byte of each is read. Where it does not say that is none. */
void segment_look_huge(struct segment *segment);

/* Place bytes of fd from offset (both page multiples) at addr, inside a reservation. Maps the
 * pages, those that are writable at once. Errors: SHD_ERANGE no whole pages, or past the segment's
 * end; SHD_ENOMEM (with vm.max_map_count's value when that is the limit); SHD_EIO. A child of
 * fork() does not have what is writable. */
int segment_place(void *addr, int fd, uint64_t offset_bytes, uint64_t bytes, bool writable,
                  struct shd_err *e);
void segment_unreserve(void *base, uint64_t bytes);

#endif
