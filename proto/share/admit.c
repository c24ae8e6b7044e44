/* See admit.h. */
#include "proto/share/admit.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/sys.h"

/* The id that all ids of another user namespace appear as: it stands for anybody. */
#define OVERFLOW_ID 65534u

#define GROUPS_STACK      64u
#define SOCKET_PATH_BYTES 108u /* of sockaddr_un */

static bool has_group(const gid_t *groups, size_t count, gid_t gid)
{
    for (size_t i = 0; i < count; i++)
        if (groups[i] == gid)
            return true;
    return false;
}

/* 1 when gid is among the peer's supplementary groups, 0 when not, else an error. */
static int peer_in_group(int fd, gid_t gid, struct shd_err *e)
{
    gid_t few[GROUPS_STACK], *groups = few;
    socklen_t bytes = sizeof few;
    int r = getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, few, &bytes);
    if (r != 0 && errno == ERANGE) { /* bytes says how many there are; they never change */
        groups = sys_malloc(bytes);
        if (groups == NULL)
            return err_set(e, SHD_ENOMEM, "no memory for the peer's %zu groups",
                           bytes / sizeof *groups);
        r = getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups, &bytes);
    }
    if (r == 0)
        r = has_group(groups, bytes / sizeof *groups, gid);
    else
        r = err_sys(e, SHD_EIO, "groups of the peer");
    if (groups != few)
        free(groups);
    return r;
}

int admit_client(int fd, const struct side_peer *peer, const char *dir, struct shd_err *e)
{
    if (side_peer_allowed(peer, "client", NULL) == SHD_OK)
        return SHD_OK;
    struct stat st;
    if (stat(dir, &st) < 0)
        return err_sys(e, SHD_EIO, "look at '%.100s'", dir);
    const mode_t group_in = S_IRGRP | S_IXGRP;
    if ((st.st_mode & group_in) != group_in || st.st_gid == OVERFLOW_ID)
        return side_peer_allowed(peer, "client", e);
    const int member = peer->gid == st.st_gid ? 1 : peer_in_group(fd, st.st_gid, e);
    if (member < 0)
        return member;
    if (member == 0)
        return err_set(e, SHD_EAUTH,
                       "client is uid %u (pid %d): only uid %u, root and members of group %u (of "
                       "the runtime directory) are allowed",
                       peer->uid, peer->pid, geteuid(), st.st_gid);
    return SHD_OK;
}

/* The directory of a socket's path. A path longer than a socket's can be is cut, and not found. */
static void directory_of(const char *path, char dir[SOCKET_PATH_BYTES])
{
    const char *slash = strrchr(path, '/');
    const int bytes = slash != NULL ? (int)(slash - path) : 0;
    if (slash == NULL)
        snprintf(dir, SOCKET_PATH_BYTES, ".");
    else
        snprintf(dir, SOCKET_PATH_BYTES, "%.*s", bytes > 0 ? bytes : 1, path);
}

int admit_daemon(const struct side_peer *peer, const char *path, struct shd_err *e)
{
    if (side_peer_allowed(peer, "daemon", NULL) == SHD_OK)
        return SHD_OK;
    char dir[SOCKET_PATH_BYTES];
    struct stat st;
    directory_of(path, dir);
    if (stat(dir, &st) < 0)
        return err_sys(e, SHD_EIO, "look at '%.100s'", dir);
    if (peer->uid != st.st_uid || peer->uid == OVERFLOW_ID)
        return err_set(e, SHD_EAUTH,
                       "daemon is uid %u (pid %d), only uid %u, root and uid %u (owner of '%.60s') "
                       "are allowed",
                       peer->uid, peer->pid, geteuid(), st.st_uid, dir);
    if ((st.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return err_set(e, SHD_EAUTH,
                       "daemon is uid %u (pid %d) in '%.60s' of mode %04o: others could put a "
                       "socket there; chmod it to 0750",
                       peer->uid, peer->pid, dir, (unsigned)st.st_mode & 07777u);
    return SHD_OK;
}
