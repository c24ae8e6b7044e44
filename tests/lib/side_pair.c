#include "tests/lib/side_pair.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>

int fds_open(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

struct side_msg msg_of(uint32_t type)
{
    return (struct side_msg){
        .magic = SIDE_MAGIC, .protocol = SHD_PROTOCOL, .type = type, .ticket = 42
    };
}

void pair_new(int ret_fds[2])
{
    EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ret_fds) == 0);
}

void pair_free(const int fds[2])
{
    close(fds[0]);
    close(fds[1]);
}

int child_status(pid_t pid)
{
    int status = -1;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
}
