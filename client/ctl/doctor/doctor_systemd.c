/* The service manager as keeper: its version, the descriptor store, the service's user. */
#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/ctl/doctor/doctor.h"

#define FDSTORE_VERSION  219 /* FDSTORE=1 */
#define PRESERVE_VERSION 254 /* FileDescriptorStorePreserve= */

/* "systemd 252 (252.39-1)" */
static int systemd_version(void)
{
    char line[128] = "";
    int version = 0;
    FILE *f = popen("systemctl --version 2>/dev/null", "re");
    if (f == NULL)
        return 0;
    if (fgets(line, sizeof(line), f) != NULL && strncmp(line, "systemd ", 8) == 0)
        version = atoi(line + 8);
    while (fgets(line, sizeof(line), f) != NULL)
        ; /* else it would see a closed pipe */
    pclose(f);
    return version;
}

static void check_manager(struct doctor *d)
{
    const int version = systemd_version();
    if (version == 0)
        doctor_ok(d, "no systemd: `shardctl run` and `up` keep the daemons' memory");
    else if (access("/run/systemd/system", F_OK) != 0)
        doctor_ok(d,
                  "systemd %d is installed, but did not start this system: `shardctl run` and "
                  "`up` keep the daemons' memory",
                  version);
    else if (version < FDSTORE_VERSION)
        doctor_warn(d, "start daemons by `shardctl run` or `up`",
                    "systemd %d cannot keep memory of a dead daemon, %d can", version,
                    FDSTORE_VERSION);
    else
        doctor_ok(d, "systemd %d keeps the memory of a daemon that died or restarts%s", version,
                  version < PRESERVE_VERSION ? "" : ", and of one that is stopped if asked to");
}

static bool in_group(gid_t gid)
{
    gid_t groups[1024];
    const int count = getgroups((int)(sizeof(groups) / sizeof(*groups)), groups);
    bool found = getegid() == gid;
    for (int i = 0; i < count && !found; i++)
        found = groups[i] == gid;
    return found;
}

/* The user comes with the package; without it nothing is wrong. */
static void check_user(struct doctor *d)
{
    const struct passwd *user = getpwnam("shardd");
    const struct group *group = getgrnam("shardd");
    if (user == NULL || group == NULL)
        return;
    if (geteuid() == 0 || geteuid() == user->pw_uid || in_group(group->gr_gid))
        doctor_ok(d, "the service's daemons run as shardd; this user may attach to them");
    else
        doctor_warn(d, "usermod -aG shardd USER, then log in anew",
                    "the service's daemons run as shardd; this user, uid %u, is not of that group "
                    "and may not attach to them",
                    (unsigned)geteuid());
}

void doctor_systemd(struct doctor *d)
{
    check_manager(d);
    check_user(d);
}
