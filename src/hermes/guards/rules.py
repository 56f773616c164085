"""The rules of the command guard as data: rules over arguments, protected folders, commands that run others."""

from __future__ import annotations

import re
from fnmatch import translate
from functools import cache

from hermes.guards.shell_expansion import plain

CLASSES = {
    **dict.fromkeys(("perms", "system", "creds", "procs", "containers", "opaque"), "S"),
    **dict.fromkeys(("delete", "git", "data"), "W"),
    "remote": "N",
    "agent": "A",
    "hard": "",
}

# A line: rule, then a command and what must be among its arguments; `|` parts alternatives, `*` matches anything.
# A word must be the next operand; what begins with `-` or `@` may be anywhere (`-x` also in a bundle, `--long` also
# shortened); `!` in front: must not be there. `root:` in front of a command: only when run as root.
RULES = """
hard       mkfs|mke2fs|mkswap|mkdosfs|newfs|blkdiscard|killall5
hard       fdisk|gdisk|sfdisk|sgdisk|cfdisk|parted !-l|--list|-p|--print|-d|--dump|@print
hard       wipefs -a|-o|--all|--offset
hard       diskutil eraseDisk|eraseVolume|partitionDisk|zeroDisk|randomDisk|secureErase|reformat
hard       shutdown|reboot|halt|poweroff !-c|--help|--version|-w|--wtmp-only
hard       init|telinit 0|6
hard       systemctl|loginctl reboot|poweroff|halt|kexec|soft-reboot|rescue|emergency
hard       systemctl start|isolate reboot.target|poweroff.target|halt.target|shutdown.target|kexec.target
hard       service|rc-service reboot|halt|shutdown|poweroff
hard       busctl|dbus-send|gdbus @*PowerOff*|*Reboot*|*Halt*
delete     shred|srm|rimraf|wipe
delete     truncate @0|-s0|--size=0|0[A-Z]
delete     rsync @--delete*|--del|--remove-source-files
delete     mv|cp @/dev/null
delete     git rm -r !--cached
delete     aws s3 rm --recursive
delete     aws s3 rb --force
delete     gsutil rm -r|-R
perms      setcap
perms      setfacl @o::*w*|o:*w*|other:*w*
system     apt|apt-get|aptitude install|remove|purge|upgrade|dist-upgrade|full-upgrade|autoremove|reinstall|build-dep
system     yum|dnf|microdnf|zypper install|remove|erase|update|upgrade|downgrade|reinstall|autoremove|localinstall|in|rm
system     dpkg -i|-r|-P|--install|--remove|--purge|--configure
system     rpm -i|-U|-F|-e|--install|--upgrade|--erase !-q|--query
system     pacman -S|-R|-U|--sync|--remove !-s|-i|--search|--info
system     apk add|del|upgrade
system     snap|flatpak|port install|remove|uninstall|refresh|update|upgrade
system     emerge|xbps-install|xbps-remove|installpkg|removepkg
system     root:pip|pip3|npm|yarn|pnpm|gem|cargo|pipx|uv|make|cpan install|uninstall|remove|update|add|i|rm|pip
system     systemctl stop|disable|mask|kill|edit|enable|link|set-default|isolate|revert
system     service|rc-service|invoke-rc.d * stop|disable
system     rc-update del|delete|add
system     update-rc.d * remove|disable|enable|defaults
system     chkconfig * off|on
system     launchctl unload|bootout|remove|disable|stop|load|bootstrap|enable
system     supervisorctl|sv|s6-svc|initctl|pm2 stop|shutdown|down|delete|kill
system     ufw disable|reset
system     setenforce 0|permissive
system     crontab !-l
system     useradd|usermod|userdel|adduser|deluser|groupadd|groupmod|groupdel|passwd|chpasswd|gpasswd|visudo|vipw|chsh
system     grub-install|update-grub|grub-mkconfig|grub2-mkconfig|efibootmgr|update-initramfs|dracut|mkinitcpio
system     docker|podman|nerdctl @--privileged*|--cap-add*|--device*|*=unconfined|*docker.sock*|label=disable
system     docker|podman|nerdctl @--pid=host|--ipc=host|--userns=host|--uts=host|--net=host|--network=host|host
system     docker|podman|nerdctl @/:*|-v/:*|--volume=/:*|/etc*:*|/boot*:*|/root*:*|/usr*:*|/home:*|/var/run*:*|*=/,*
creds      security find-generic-password|find-internet-password|dump-keychain|export|unlock-keychain
creds      secret-tool lookup|search|store
creds      gpg|gpg2 @--export-secret*
creds      pass show|edit|ls
creds      keyring get|set
creds      op read|item|get
creds      gh auth token|refresh|login
creds      gcloud auth print-access-token|print-identity-token|application-default
creds      aws configure|sts
creds      az account get-access-token
creds      kubectl config view --raw
creds      kubectl get secret|secrets|secret/*|secrets/*
creds      git credential fill|approve
creds      npm|yarn|pnpm token
creds      ssh-keygen -p|-y
agent      hermes @update|upgrade|install|uninstall|setup|--yolo|--fix
agent      hermes gateway stop|restart|key|run|install|uninstall
agent      hermes config set|unset|edit|migrate
agent      hermes tools|approvals|skills|mcp|auth enable|disable|remove|edit|new|add|login|logout
agent      hermes memory|cron|profile edit|reset|create|remove|pause|resume|use|rename|delete
agent      hermes sessions delete|prune|import|repair|migrate|optimize
agent      hermes migrate
agent      hermes runs stop|steer|approve|deny|answer
agent      hermes model * !@list|--help
agent      pip|pip3|pipx|uv|brew @install|uninstall|upgrade|reinstall|remove @hermes|hermes-agent|hermes-gateway|hermes[=<>~[]*|hermes-gateway[=<>~[]*
agent      pkill|killall @*hermes*
agent      systemctl|service|launchctl|supervisorctl|docker|podman @stop|restart|kill|disable|mask|rm|unload @*hermes*
agent      systemctl|launchctl set-environment|import-environment|setenv|unset-environment @*HERMES*
procs      pkill|killall|skill|xkill
procs      fuser -k|--kill
remote     ssh|autossh -L|-R|-D|-w|@*LocalForward*|*RemoteForward*|*DynamicForward*
remote     nc|ncat|netcat -e|-c|--exec|--sh-exec|--lua-exec
remote     socat @EXEC:*|SYSTEM:*|SHELL:*|exec:*|system:*|shell:*|*-LISTEN:*|*-listen:*
remote     ngrok|localtunnel|lt|frpc|chisel|bore|sshuttle|rathole|tunnelto|pagekite|gost
remote     cloudflared tunnel|access
remote     tailscale funnel|serve
remote     code|code-server tunnel
git        git reset --hard
git        git clean -f|--force !-n|--dry-run
git        git push -f|-d|@--force*|--mirror|--delete|--prune|+*|:*
git        git branch -D
git        git branch -d|--delete -f|--force
git        git filter-branch|filter-repo
git        git rebase !--abort|--continue|--skip|--quit|--edit-todo|--show-current-patch
git        git checkout|switch|checkout-index -f|--force|--discard-changes|@--|.|:/*
git        git checkout * * !-b|-B|-t|--orphan|--track
git        git restore !-S|--staged
git        git restore -W|--worktree
git        git stash drop|clear
git        git reflog expire|delete
git        git gc @--prune=now|--prune=all
git        git update-ref -d
git        git worktree remove -f|--force
git        git submodule deinit -f|--force|--all
git        git read-tree --reset
data       dropdb|dropuser
data       mysqladmin drop
data       rails|rake @db:drop*|db:reset*|db:purge*|db:migrate:reset*|db:schema:load*
data       prisma migrate reset
data       prisma db push --force-reset
data       php *artisan migrate:fresh|migrate:reset|migrate:refresh|db:wipe
data       python|python3|manage.py|django-admin @flush|reset_db|sqlflush
data       alembic downgrade base
data       flyway clean
data       liquibase drop-all|dropAll
data       supabase db reset
data       mongorestore --drop
data       pg_restore -c|--clean
data       bq rm
data       aws rds|dynamodb|redshift delete-*
containers docker|podman|nerdctl rm|stop|kill
containers docker|podman|nerdctl container|pod|volume|system|network|stack|service|node rm|remove|stop|kill|prune|down
containers docker swarm leave
containers docker-compose|podman-compose down|rm|stop|kill
containers kubectl|oc delete|drain
containers kubectl|oc scale @--replicas=0
containers helm uninstall|delete|un
containers kind|eksctl|minikube|microk8s|kubeadm delete|stop|reset
containers k3d cluster|node delete|stop
containers gcloud container clusters delete
containers az aks delete|stop
containers aws eks|ecs delete-*|stop-*
containers terraform|tofu|terragrunt destroy
containers terraform|tofu|terragrunt apply -destroy|--destroy
containers vagrant|multipass destroy|halt|delete|stop|purge
containers lxc|incus delete|stop
containers virsh destroy|undefine|shutdown
opaque     hash -p
opaque     enable -f
opaque     declare|typeset|local -n
"""


def _table(text: str) -> dict[str, str]:
    lines = (line.partition(": ") for line in text.strip().splitlines())
    return {name: rest.strip() for names, _, rest in lines for name in names.rstrip(":").split("|")}


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _folders(text: str) -> tuple[str, ...]:
    """Paths out of one text, each with a slash at its end; `#` stands for a blank."""
    return tuple(name.replace("#", " ") + "/" for name in text.split())


# Options that take the next argument, where operands are counted.
VALUES = _table("""
git: -C -c --git-dir --work-tree --namespace --exec-path
docker|podman|nerdctl: -H --host -c --context --config -l --log-level
docker-compose: -f --file -p --project-name --env-file --profile
kubectl|oc: -n --namespace --context --kubeconfig --cluster -s --server
helm: -n --namespace --kube-context --kubeconfig
systemctl: -H --host -M --machine -t --type -p --property
aws: --profile --region --output
gcloud: --project --account
apt|apt-get: -o -c -t
hermes: --profile -p
php: -d -c
""")

# Commands that run another: options with a value; a number of operands before the command; `text`: what is left is
# shell text; `c`: the value of -c is; `env`: assignments may come first.
WRAPPERS = _table("""
sudo: env -C -D -g -h -p -R -r -T -t -U -u --user --group --host --prompt --chdir --chroot --role --type
doas: env -C -u
env: env -u -C -S --unset --chdir --split-string
su|sg|script: 9 c -g -G -s -w -T -O -I -B -E -m -o --shell --group --supp-group --log-out --log-in --log-io
runuser: c -u -g -G -s --user --group
pkexec: --user
command|builtin|nohup|setsid|unbuffer|busybox|toybox|systemd-inhibit|torsocks|bunx|poetry run|pipenv run|bundle exec:
linux64|firejail|fakeroot|eatmydata|git bisect run:
exec: -a
nice: -n --adjustment
ionice: -c -n -p --class --classdata
chrt: 1 -T -P -D
taskset|setarch|gosu|su-exec: 1
timeout: 1 -k -s --kill-after --signal
time: -f -o --format --output
stdbuf: -i -o -e --input --output --error
watch: text -n --interval
git submodule foreach: text
ssh: 1 text -B -b -c -D -E -e -F -I -i -J -L -l -m -O -o -P -p -Q -R -S -W -w
sshpass: -p -f -P
chroot: 1 --userspec --groups
unshare|nsenter: -t -S -G -R -w --setuid --setgid --root --wd --target
strace|ltrace: -e -o -p -s -u -E -I -O -S -a -b -P -n -l -x
flock: 1 c -w -E --timeout --conflict-exit-code
prlimit|cpulimit: -p --pid -l
systemd-run: -u -p -t -M -H -E --unit --property --uid --gid --setenv --slice --working-directory
tini|dumb-init|proxychains|proxychains4: -p -e -r -f
xvfb-run: -e -f -n -p -s -w
npx|caffeinate: -p --package -t -w
ld.so: --library-path --preload --argv0
uv run: -p --python --with --extra --group --env-file --project --directory
tmux new|tmux new-session: text -s -n -c -x -y -t -F
screen: -S -c -e -h -p -s -t -T
docker exec|podman exec: 1 -e -u -w --env --user --workdir --env-file --detach-keys
docker-compose exec: 1 -e -u -w --env --user --workdir --index
kubectl exec|oc exec: 1 -n --namespace -c --container
""")
ROOT = _set("sudo doas su pkexec runuser gosu su-exec")
SHELLS = _set("sh bash zsh dash ash ksh mksh fish rbash yash csh tcsh")
CODE = _table("""
python|python2|python3|pypy3: -c
perl: -e -E
ruby|lua|osascript: -e
node|nodejs|bun|deno: -e -p --eval --print
php: -r
pwsh: -c
tclsh|awk|gawk|mawk|nawk:
""")
SQL = _set("""psql mysql mariadb sqlite3 sqlite duckdb cockroach clickhouse clickhouse-client sqlcmd isql bq pgcli mycli
    litecli snowsql cqlsh mongosh mongo redis-cli valkey-cli usql""")
NETWORK = _set("""curl wget aria2c http https xh lynx w3m nc ncat netcat socat telnet ftp tftp lftp scp sftp rsync ssh
    openssl""")
SINKS = _set("nc ncat netcat socat telnet ftp sftp tftp ssh openssl")
TRANSFERS = _set("curl wget scp rsync sftp aws gsutil rclone gh")
PIDS = _set("pgrep pidof ps lsof fuser ss netstat top")
DECODERS = _table("""
base64|base32|basenc: -d -D --decode
xxd: -r
openssl|gzip: -d
gpg: -d --decrypt
uudecode|rev|tr|zcat|gunzip|bzcat|xzcat|unxz|iconv:
""")
# Of the operands, what is written: all or the last one; options that name a file to be written.
WRITES = {
    **dict.fromkeys(
        _set("""rm rmdir unlink mv tee touch mkdir truncate shred chmod chown chgrp chattr setfacl mkfifo mknod ed ex vi
            vim nvim nano emacs sudoedit patch mkfs wipefs srm"""),
        "all",
    ),
    **dict.fromkeys(_set("cp install ln rsync scp"), "last"),
}
IN_PLACE = _set("sed gsed perl ruby yq")
OUTPUTS = _table("""
curl: -o --output --output-dir -D
wget: -O -P -o --output-document --directory-prefix
tar: -C --directory
unzip|aria2c: -d
cp|mv|install|ln: -t --target-directory
sort|gcc|gpg: -o --output
ssh-keygen: -f
openssl: -out
dd: of
""")

SYSTEM_FOLDERS = _set("""
    / /bin /boot /dev /efi /etc /home /lib /lib32 /lib64 /libx32 /media /mnt /opt /proc /root /run /sbin /srv /sys /usr
    /usr/bin /usr/include /usr/lib /usr/lib32 /usr/lib64 /usr/libexec /usr/local /usr/local/bin /usr/local/lib /usr/sbin
    /usr/share /var /var/lib /var/log /var/spool /var/db /nix /nix/store /snap /System /Library /Applications /Users
    /Volumes /private /private/etc /private/var""")
SYSTEM_WRITES = _folders("""
    /etc /private/etc /boot /efi /lib/systemd /usr/lib/systemd /usr/local/lib/systemd /run/systemd /var/spool/cron
    /var/spool/at /var/cron /Library/LaunchDaemons /Library/LaunchAgents ~/.config/systemd ~/.config/autostart
    ~/Library/LaunchAgents ~/.local/share/systemd""")
CREDENTIALS = _folders("""
    ~/.ssh ~/.gnupg ~/.aws ~/.azure ~/.kube ~/.docker ~/.config/gh ~/.config/hub ~/.config/glab-cli ~/.config/gcloud
    ~/.config/containers ~/.config/doctl ~/.config/op ~/.config/rclone ~/.config/git/credentials ~/.oci ~/.fly ~/.boto
    ~/.databrickscfg ~/.s3cfg ~/.terraform.d ~/.terraformrc ~/.vault-token ~/.netrc ~/.pgpass ~/.my.cnf ~/.mylogin.cnf
    ~/.npmrc ~/.yarnrc ~/.yarnrc.yml ~/.pypirc ~/.git-credentials ~/.cargo/credentials ~/.cargo/credentials.toml
    ~/.gem/credentials ~/.m2/settings.xml ~/.m2/settings-security.xml ~/.gradle/gradle.properties ~/.nuget
    ~/.composer/auth.json ~/.config/composer/auth.json ~/.huggingface ~/.cache/huggingface/token ~/.password-store
    ~/.local/share/keyrings ~/.local/share/kwalletd ~/.mozilla ~/.thunderbird ~/.config/google-chrome ~/.config/chromium
    ~/.config/BraveSoftware ~/.config/microsoft-edge ~/snap/firefox ~/Library/Keychains ~/Library/Cookies
    ~/Library/Application#Support/Google ~/Library/Application#Support/Firefox /Library/Keychains
    /etc/shadow /etc/gshadow /etc/sudoers /etc/sudoers.d /run/secrets /var/run/secrets""")
START_FILES = _folders("""
    ~/.bashrc ~/.bash_profile ~/.bash_login ~/.bash_logout ~/.bash_aliases ~/.profile ~/.zshrc ~/.zshenv ~/.zprofile
    ~/.zlogin ~/.zlogout ~/.kshrc ~/.cshrc ~/.tcshrc ~/.login ~/.config/fish ~/.xprofile ~/.xinitrc ~/.xsessionrc""")
PRIVATE = CREDENTIALS + START_FILES
# Names that are no commands, and variables by which one is run in a hidden way.
RESERVED = _set("if then elif else fi while until do done for select case esac in { } [[ ! function coproc")
HIDING = _set("PS4 PROMPT_COMMAND BASH_ENV LD_PRELOAD DYLD_INSERT_LIBRARIES")
FIND_WALKS = _set("-delete -print -print0 -depth -maxdepth -mindepth -type -xdev -mount -ls -quit")
PRINTS = _set("echo printf pwd true : cd test [ which")


@cache
def _pattern(globs: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, globs)) or r"(?!)")


class _Test:
    """A word of a rule: alternatives that must, or must not, be among the arguments."""

    __slots__ = ("absent", "long", "operand", "other", "short")

    def __init__(self, text: str) -> None:
        self.absent = text.startswith("!")
        alternatives = text.removeprefix("!").split("|")
        self.operand = alternatives[0][0] not in "-@"
        options = [alt for alt in alternatives if alt[0] == "-" and alt != "--" and set(alt).isdisjoint("*?[")]
        self.short = frozenset(alt[1] for alt in options if len(alt) == 2)
        self.long = frozenset(alt for alt in options if len(alt) > 2)
        self.other = tuple(alt.removeprefix("@") for alt in alternatives if alt not in options)

    def holds(self, args: list[str], short: set[str], long: set[str]) -> bool:
        is_there = not self.short.isdisjoint(short) or any(map(_pattern(self.other).match, args))
        is_there = is_there or any(alt == o or (len(o) > 3 and alt.startswith(o)) for alt in self.long for o in long)
        return is_there is not self.absent


def _compiled() -> dict[str, list[tuple[str, bool, list[_Test]]]]:
    table: dict[str, list[tuple[str, bool, list[_Test]]]] = {}
    for rule, names, *tests in map(str.split, RULES.strip().splitlines()):
        for name in names.removeprefix("root:").split("|"):
            table.setdefault(name, []).append((rule, names.startswith("root:"), list(map(_Test, tests))))
    return table


_TABLE = _compiled()


def name_of(name: str) -> str:
    """A command's name without version or kind of file system."""
    if name.startswith(("mkfs.", "ld-linux", "ld-musl")):
        return "mkfs" if name[0] == "m" else "ld.so"
    short = name.rstrip("0123456789.-") if name[-1].isdigit() and name not in _TABLE else name
    return short if short in _TABLE or short in WRAPPERS or short in CODE else name


def hits(argv: list[str], root: bool) -> list[str]:
    if argv[0] not in _TABLE:
        return []
    args = [plain(arg) for arg in argv[1:]]
    options = [arg for arg in args if arg[:1] == "-" and len(arg) > 1]
    short = {letter for arg in options if arg[1] != "-" for letter in (arg[1:] if arg[1:].isalnum() else arg[1])}
    long = {arg.partition("=")[0] for arg in options}
    rules: list[str] = []
    for rule, needs_root, tests in _TABLE[argv[0]]:
        operand_tests = [test for test in tests if test.operand]
        operands = [arg for arg in args if arg[:1] != "-"][: len(operand_tests)]
        passed = len(operands) == len(operand_tests) and all(
            _pattern(test.other).match(arg) for test, arg in zip(operand_tests, operands, strict=True)
        )
        passed = passed and (root or not needs_root)
        if passed and all(test.holds(args, short, long) for test in tests if not test.operand):
            rules.append(rule)
    return rules
