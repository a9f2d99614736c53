// E2B's own JavaScript client, unchanged, on the farm: prints "done" after all checks passed.
import assert from 'node:assert'
import { createRequire } from 'node:module'

const { url, key, packages } = JSON.parse(process.argv[2])
Object.assign(process.env, { E2B_API_KEY: key, E2B_API_URL: url, E2B_SANDBOX_URL: url })
// its packages are in a folder from an argument, and not above this file
const { Sandbox, NotFoundError, SandboxNotFoundError, CommandExitError, TimeoutError, FileType } =
  createRequire(`${packages}/`)('e2b')

const sandbox = await Sandbox.create('base', { timeoutMs: 300_000, envs: { GIVEN: 'yes' }, metadata: { who: 'js' } })
try {
  const done = await sandbox.commands.run('echo out; echo err >&2; echo $GIVEN')
  assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['out\nyes\n', 'err\n', 0])
  await assert.rejects(sandbox.commands.run('exit 3'), (e) => e instanceof CommandExitError && e.exitCode === 3)
  await assert.rejects(sandbox.commands.run('sleep 600', { timeoutMs: 1000 }), TimeoutError)
  const seen = []
  await sandbox.commands.run('for i in 1 2 3; do echo $i; sleep 0.1; done', { onStdout: (t) => { seen.push(t) } })
  assert.deepEqual(seen, ['1\n', '2\n', '3\n'])
  const cat = await sandbox.commands.run('cat', { background: true, stdin: true })
  await sandbox.commands.sendStdin(cat.pid, 'héllo\n')
  await sandbox.commands.closeStdin(cat.pid)
  assert.equal((await cat.wait()).stdout, 'héllo\n')
  const server = await sandbox.commands.run('sleep 600', { background: true })
  assert.equal((await sandbox.commands.list()).filter((p) => p.pid === server.pid).length, 1)
  assert.equal(await server.kill(), true)
  assert.equal(await sandbox.commands.kill(server.pid), false)
  await sandbox.files.write('/workspace/a/é.txt', 'text')
  assert.equal(await sandbox.files.read('/workspace/a/é.txt'), 'text')
  const data = new Uint8Array(1_000_000).map((_, n) => n % 256)
  await sandbox.files.write('/workspace/b', data.buffer)
  assert.deepEqual(await sandbox.files.read('/workspace/b', { format: 'bytes' }), data)
  await sandbox.files.write([{ path: '/tmp/1', data: 'one' }, { path: '/tmp/2', data: 'two' }])
  assert.equal(await sandbox.files.read('/tmp/2'), 'two')
  assert.deepEqual((await sandbox.files.list('/workspace')).map((e) => [e.name, e.type]), [['a', FileType.DIR], ['b', FileType.FILE]])
  assert.equal(await sandbox.files.exists('/nothere'), false)
  await assert.rejects(sandbox.files.read('/nothere'), NotFoundError)
  assert.equal((await sandbox.files.rename('/tmp/1', '/tmp/3')).path, '/tmp/3')
  await sandbox.files.remove('/tmp/3')
  assert.equal(await sandbox.files.makeDir('/workspace/a'), false)
  const out = []
  const pty = await sandbox.pty.create({ cols: 80, rows: 24, onData: (d) => { out.push(Buffer.from(d).toString()) } })
  await sandbox.pty.sendInput(pty.pid, new TextEncoder().encode('stty size\nexit\n'))
  await pty.wait()
  assert.match(out.join(''), /24 80/)
  assert.equal((await sandbox.getInfo()).metadata.who, 'js')
  const listed = await Sandbox.list({ query: { metadata: { who: 'js' } } }).nextItems()
  assert.equal(listed.length, 1)
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal((await again.commands.run('echo on')).stdout, 'on\n')
  const many = await Promise.all([...Array(30).keys()].map((n) => sandbox.commands.run(`sleep 0.1; echo ${n}`)))
  assert.deepEqual(many.map((m) => m.stdout), [...Array(30).keys()].map((n) => `${n}\n`))
} finally {
  assert.equal(await sandbox.kill(), true)
}
assert.equal(await sandbox.isRunning(), false)
await assert.rejects(sandbox.commands.run('true'), SandboxNotFoundError)
console.log(JSON.stringify('done'))
