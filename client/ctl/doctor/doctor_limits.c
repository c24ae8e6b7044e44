/* What one process may have: mappings, descriptors, locked memory. */
#include <inttypes.h>
#include <sys/resource.h>

#include "client/ctl/doctor/doctor.h"

/* One mapping per unit and daemon, of parameters and of gradients; Linux' default is 65,530. */
#define MAPPINGS_MIN UINT64_C(65530)

/* A session takes 3 in the daemon, a model a handful; below this a few hundred workers do not fit.
 */
#define FILES_MIN 4096u

#define LOCKED_MIN (UINT64_C(64) << 20)

static void check_mappings(struct doctor *d)
{
    uint64_t max;
    if (!doctor_read_u64("/proc/sys/vm/max_map_count", &max))
        doctor_ok(d, "vm.max_map_count cannot be read here");
    else if (max < MAPPINGS_MIN)
        doctor_warn(d, "sysctl -w vm.max_map_count=262144 (and in /etc/sysctl.d)",
                    "vm.max_map_count is %" PRIu64 ": a worker maps 2 ranges per unit and daemon, "
                    "so about %" PRIu64 " units x daemons fit",
                    max, max / 2);
    else
        doctor_ok(d, "vm.max_map_count %" PRIu64 ": room for about %" PRIu64 " units x daemons",
                  max, max / 2);
}

static const char *limit_text(rlim_t n, char buf[24])
{
    if (n == RLIM_INFINITY)
        snprintf(buf, 24, "unlimited");
    else
        snprintf(buf, 24, "%" PRIu64, (uint64_t)n);
    return buf;
}

static void check_files(struct doctor *d)
{
    struct rlimit files;
    char soft[24], hard[24];
    if (getrlimit(RLIMIT_NOFILE, &files) < 0)
        return;
    limit_text(files.rlim_cur, soft);
    limit_text(files.rlim_max, hard);
    if (files.rlim_max < FILES_MIN)
        doctor_warn(d, "raise the hard limit: LimitNOFILE= of the service, or `ulimit -Hn`",
                    "RLIMIT_NOFILE %s, at most %s: daemons need some for each session", soft, hard);
    else
        doctor_ok(d, "RLIMIT_NOFILE %s, daemons raise it to %s", soft, hard);
}

/* Only GPU daemons lock memory, so a small limit is no more than a remark. */
static void check_locked(struct doctor *d)
{
    struct rlimit locked;
    char text[24];
    if (getrlimit(RLIMIT_MEMLOCK, &locked) < 0)
        return;
    if (locked.rlim_cur == RLIM_INFINITY)
        doctor_ok(d, "RLIMIT_MEMLOCK unlimited");
    else
        doctor_ok(d, "RLIMIT_MEMLOCK %s%s", doctor_bytes(locked.rlim_cur, text),
                  locked.rlim_cur < LOCKED_MIN ? ": enough for cpu daemons, a GPU wants unlimited"
                                               : "");
}

void doctor_limits(struct doctor *d)
{
    check_mappings(d);
    check_files(d);
    check_locked(d);
}
